# SPDX-License-Identifier: Apache-2.0
"""What staging and metadata cost in a step, operation by operation.

Real engines, eager, on steps that stage in different ways: one long prompt, its second
chunk, prompts just over the ring, prompts that fit in it (nothing to stage), a long
prompt beside decoding requests, decoding alone. Two models: Gemma 3 270M (one KV head
of 256), and random weights with 8 KV heads of 64. Prefix caching is off: the blocks it
retains would be copied too.

Measured by the torch profiler, milliseconds in a step, medians over rounds of stock and
ring in turn, every round an engine in a fresh process: the whole step, attention
kernels, cache updates, block copies to and from staging, metadata of all groups.
Counted: blocks copied in and out in all groups, and the least that could be (the
context that queries read, and of the chunk what later ones may); bytes that staging
grew after start-up. Exit code 1 if it copies or grows more than it must.

    python -m benchmarks.staging --quick
"""

import os
import sys
from pathlib import Path

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import json
import subprocess
import tempfile
from typing import Any, NamedTuple

from benchmarks.common import ROOT, finish, parser, spread
from benchmarks.models import gemma3_270m, random_prompts, tiny_model
from benchmarks.throughput import BACKENDS
from vllm_ringwindow.geometry import cdiv

WINDOW, BLOCK = 512, 128  # tokens
BATCHED = 4200  # tokens in a step
R = 5  # blocks of a ring: cdiv(W - 1, 128) + 1
WARM_UP = 1  # steps of each workload that are not counted


class Workload(NamedTuple):
    """One step. ``chunk``: of the prompts' chunks, which one is measured."""

    lengths: list[int]  # of the prompts in prefill
    decoding: int = 0  # requests that decode beside them
    chunk: int = 0

    def least_copies(self) -> tuple[int, int]:
        """Blocks in and out per group that no ring can do without.

        In: from the window of the chunk's first query to the block being filled. Out:
        as many of the chunk's last blocks as a ring holds. None if all of it fits.
        """
        first = self.chunk * BATCHED
        blocks_in = blocks_out = 0
        for length in self.lengths:
            base = max(first - WINDOW + 1, 0) // BLOCK
            if cdiv(length, BLOCK) - base > R:
                blocks_in += cdiv(first, BLOCK) - base
                blocks_out += min(R, cdiv(length, BLOCK) - first // BLOCK)
        return blocks_in, blocks_out


WORKLOADS = {
    "one prompt of 4000": Workload([4000]),
    "second chunk of a prompt of 7000": Workload([7000], chunk=1),
    "6 prompts of 660, just over the ring": Workload([660] * 6),
    "16 prompts of 250, in the ring": Workload([250] * 16),
    "a prompt of 2000 and 8 decoding": Workload([2000], decoding=8),
    "8 decoding": Workload([], decoding=8),
}
MODELS = {
    "gemma3-270m": "1 KV head of 256",
    "random": "8 KV heads of 64",
}


def model_path(name: str, scratch: str) -> Path:
    if name == "gemma3-270m":
        return gemma3_270m()
    return tiny_model(
        "gemma3",
        scratch,
        window=WINDOW,
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        query_pre_attn_scalar=64,
    )


def child() -> None:
    """Read a job on stdin; a list of steps per workload on stdout."""
    job = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process to profile
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM

    watched = Watched()
    llm = LLM(
        job["model"],
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        block_size=BLOCK,
        max_model_len=8192,
        max_num_batched_tokens=BATCHED,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
        use_tqdm_on_load=False,
        **BACKENDS[job["backend"]],
    )
    steps = {
        name: [
            profile_step(llm, watched, WORKLOADS[name], seed=i)
            for i in range(WARM_UP + job["steps"])
        ][WARM_UP:]
        for name in WORKLOADS
    }
    out.write(json.dumps(steps))
    out.close()
    llm.llm_engine.engine_core.shutdown()


class Watched:
    """Names attention and metadata in the profile, and keeps what was built."""

    def __init__(self) -> None:
        from vllm.v1.attention.backends.cpu_attn import (
            CPUAttentionBackendImpl,
            CPUAttentionMetadataBuilder,
        )

        from vllm_ringwindow.attention.cpu import RingCPUImpl, RingCPUMetadataBuilder
        from vllm_ringwindow.attention.staging import Staging

        self.staging = Staging
        self.built: list[Any] = []
        self._wrap(CPUAttentionMetadataBuilder, "build", "metadata (inner)")
        self._wrap(RingCPUMetadataBuilder, "build", "metadata", self.built.append)
        self._wrap(CPUAttentionBackendImpl, "forward", "attention (inner)")
        self._wrap(RingCPUImpl, "forward", "attention")

    @staticmethod
    def _wrap(owner: type, name: str, label: str, keep=lambda result: None) -> None:
        from torch.profiler import record_function

        original = getattr(owner, name)

        def named(*args, **kwargs):
            with record_function(label):
                result = original(*args, **kwargs)
            keep(result)
            return result

        setattr(owner, name, named)

    def staging_bytes(self) -> int:
        return sum(s.buffer.numel() for s in self.staging._shared.values())


def profile_step(llm, watched: Watched, workload: Workload, seed: int) -> dict:
    """The workload's step, profiled."""
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams

    engine = llm.llm_engine

    def add(prompts: list[list[int]], name: str, new: int) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        for i, prompt in enumerate(prompts):
            engine.add_request(f"{name}{i}", {"prompt_token_ids": prompt}, params)

    decoding = workload.decoding
    every = [800] * decoding + workload.lengths
    prompts = random_prompts(every, vocab_size=500, seed=seed)
    add(prompts[:decoding], "decoding", 6)
    for _ in range(3 if decoding else 0):  # two steps of prefill, one of decode
        engine.step()
    add(prompts[decoding:], "prefill", 1)
    for _ in range(workload.chunk):
        engine.step()
    watched.built.clear()
    before = watched.staging_bytes()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        engine.step()
    grown = watched.staging_bytes() - before
    built = list(watched.built)
    while engine.has_unfinished_requests():
        engine.step()
    staged = [p for metadata in built for p in getattr(metadata, "staged", ())]
    return figures(profiler.events()) | dict(
        passes=len(staged),
        blocks_in=sum(p.copy_in_from.numel() for p in staged),
        blocks_out=sum(p.copy_out_to.numel() for p in staged),
        groups=len(built),
        grown_bytes=grown,
    )


def figures(events) -> dict[str, float]:
    """Milliseconds by part. Every event counts once, below its outermost name."""
    parts = dict.fromkeys(("kernel", "update", "copies", "metadata"), 0.0)
    for event in events:
        above = names_above(event)
        if event.name == "_C::cpu_attention_with_kv_cache":
            part = "kernel"
        elif event.name == "_C::cpu_attn_reshape_and_cache":
            part = "update"
        elif (
            event.name in ("aten::index", "aten::index_put_")
            and "attention" in above
            and "attention (inner)" not in above
        ):
            part = "copies"
        elif event.name.startswith("metadata") and not any(
            name.startswith("metadata") for name in above
        ):
            part = "metadata"
        else:
            continue
        parts[part] += event.cpu_time_total / 1000
    started = min(event.time_range.start for event in events)
    stopped = max(event.time_range.end for event in events)
    return {"step": (stopped - started) / 1000} | parts


def names_above(event) -> set[str]:
    names = set()
    while (event := event.cpu_parent) is not None:
        names.add(event.name)
    return names


def measure(model: Path, backend: str, steps: int) -> dict[str, list[dict]]:
    job = dict(model=str(model), backend=backend, steps=steps)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.staging", "--child"],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return json.loads(done.stdout)


def rows_of(name: str, rounds: int, steps: int) -> list[dict]:
    taken: dict[str, dict[str, list[dict]]] = {
        backend: {workload: [] for workload in WORKLOADS} for backend in BACKENDS
    }
    with tempfile.TemporaryDirectory() as scratch:
        path = model_path(name, scratch)
        for number in range(rounds):
            for backend in BACKENDS:
                print(f"{name}: {backend}, round {number + 1}", file=sys.stderr)
                for workload, found in measure(path, backend, steps).items():
                    taken[backend][workload] += found
    rows = []
    for workload, about in WORKLOADS.items():
        stock = None
        for backend in BACKENDS:
            found = taken[backend][workload]
            ms = {
                f"{part}_ms": spread([f[part] for f in found])["median"]
                for part in ("step", "kernel", "update", "copies", "metadata")
            }
            row = dict(model=name, heads=MODELS[name], workload=workload)
            row |= dict(backend=backend) | ms
            if stock is None:
                stock = ms
            else:
                extra = ms["copies_ms"] + ms["metadata_ms"] - stock["metadata_ms"]
                last = found[-1]
                least_in, least_out = about.least_copies()
                row |= dict(
                    ring_share=extra / ms["step_ms"],
                    kernel_ratio=ms["kernel_ms"] / stock["kernel_ms"],
                    passes=last["passes"],
                    blocks_in=max(f["blocks_in"] for f in found),
                    blocks_out=max(f["blocks_out"] for f in found),
                    least_in=least_in * last["groups"],
                    least_out=least_out * last["groups"],
                    grown_bytes=sum(f["grown_bytes"] for f in found),
                )
            rows.append(row)
    return rows


def wrong(row: dict) -> str | None:
    """What must never be, or None."""
    if row["backend"] != "ring":
        return None
    if row["grown_bytes"]:
        return "staging grew after start-up"
    if row["blocks_in"] != row["least_in"]:
        return "it does not copy in what the chunk reads, no more and no less"
    if row["blocks_out"] != row["least_out"]:
        return "it does not copy out what later steps read, no more and no less"
    return None


def main() -> int:
    if "--child" in sys.argv:
        child()
        return 0
    options = parser("Staging and metadata, operation by operation")
    options.add_argument("--rounds", type=int, help="of each (default 3; quick 1)")
    args = options.parse_args()
    rounds = args.rounds or (1 if args.quick else 3)
    steps = 3 if args.quick else 8
    rows = [row for name in MODELS for row in rows_of(name, rounds, steps)]
    finish(args, "staging", rows, model="gemma3-270m-and-random")
    failed = 0
    for row in rows:
        if reason := wrong(row):
            print(f"WRONG {row['model']}, {row['workload']}: {reason}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
