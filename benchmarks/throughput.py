# SPDX-License-Identifier: Apache-2.0
"""``LLM.generate`` on Gemma 3 270M, stock against ring: tokens per second.

Measured: output and prompt tokens per second of wall-clock time, from the call of
``generate`` to its return, after a warm-up; start-up is not counted. Counted: scheduler
steps, requests running after each step (mean), preemptions. Every measurement is an
engine in a fresh process, stock and ring in turn.

Regimes: ``decode`` and ``prefill`` have more memory than they need; ``A`` and ``B``
have so few blocks that stock can run few requests at once. Prompts are random token
ids, so that none finds another's prefix; output lengths are fixed. Bfloat16, which is
what the model comes in and what the CPU build runs fastest; block size 128; all else
is vLLM's default.

    python -m benchmarks.throughput --quick
    python -m benchmarks.throughput --regime A --regime B --rounds 3
"""

import os
import sys
from pathlib import Path

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import json
import random
import subprocess
import time
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common import ROOT, alternate, finish, parser, show, spread
from benchmarks.models import gemma3_270m, random_prompts

BACKENDS: dict[str, dict[str, Any]] = {
    "stock": {},
    "ring": {"attention_backend": "RING"},
}
COMMON: dict[str, Any] = dict(
    block_size=128,
    max_model_len=8192,
    max_num_batched_tokens=4096,
    skip_tokenizer_init=True,
    use_tqdm_on_load=False,
)
AMPLE: dict[str, Any] = dict(kv_cache_memory_bytes=3 << 30)
COLOURS = {"stock": "#d95f02", "ring": "#1b6ca8"}


@dataclass(frozen=True)
class Regime:
    """A batch of requests that arrive together.

    ``lengths``: shortest and longest prompt, in tokens. ``new``: output tokens of
    each. ``rate``: what the bar is about. ``bar``: the least ring/stock ratio of it.
    ``rounds``: measurements of each backend.
    """

    num_prompts: int
    lengths: tuple[int, int]
    new: int
    options: dict[str, Any]
    bar: float
    rate: str = "output_tok_s"
    rounds: int = 5

    def prompt_lengths(self) -> list[int]:
        return [
            random.Random(i).randint(*self.lengths) for i in range(self.num_prompts)
        ]


def tight(blocks: int) -> dict[str, Any]:
    """So many blocks in the pool, whatever a block's size in bytes."""
    return AMPLE | dict(num_gpu_blocks_override=blocks)


REGIMES = {
    "decode": Regime(8, (400, 1200), 384, AMPLE, 0.98),
    "prefill": Regime(8, (3000, 5000), 8, AMPLE, 0.98, "prompt_tok_s"),
    "A": Regime(12, (5400, 6600), 512, tight(330), 1.30, rounds=3),
    "B": Regime(24, (2000, 6000), 256, tight(400), 1.10, rounds=3),
}
QUICK = {
    "decode": Regime(8, (400, 800), 96, AMPLE, 0.98, rounds=3),
    "prefill": Regime(3, (3000, 5000), 8, AMPLE, 0.98, "prompt_tok_s", rounds=3),
    "A": replace(REGIMES["A"], rounds=1),
    "B": replace(REGIMES["B"], rounds=1),
}
SHORT: dict[str, Any] = dict(max_model_len=2048, max_num_batched_tokens=1024)
TINY = {  # to try the script itself, not to learn anything
    "decode": Regime(2, (100, 200), 8, AMPLE, 0.0),
    "prefill": Regime(2, (600, 900), 2, AMPLE, 0.0, "prompt_tok_s"),
    "A": Regime(3, (900, 1100), 8, tight(90) | SHORT, 0.0),
    "B": Regime(4, (500, 1100), 8, tight(100) | SHORT, 0.0),
}


def measure(regime: Regime, backend: str, dtype: str, eager: bool) -> dict[str, float]:
    """One measurement, in a process of its own."""
    lengths = regime.prompt_lengths()
    options = dict(dtype=dtype, enforce_eager=eager)
    job = dict(
        backend=backend,
        options=COMMON | regime.options | BACKENDS[backend] | options,
        lengths=lengths,
        new=regime.new,
    )
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.throughput", "--child"],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return json.loads(done.stdout)


def child() -> None:
    """Read a job on stdin, measure, write the figures on stdout and nothing else."""
    job = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM and its compilers print goes to stderr
    # Read by vLLM at import. In this process, the scheduler can be watched.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams

    started = time.monotonic()
    llm = LLM(str(gemma3_270m()), **job["options"])
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    rings = any(type(m).__name__ == "RingBlockManager" for m in managers)
    if rings != (job["backend"] == "ring"):
        raise RuntimeError(f"backend {job['backend']}: rings in use: {rings}")

    def timed(lengths: list[int], new: int, seed: int) -> float:
        """Seconds that ``generate`` takes."""
        tokens = random_prompts(lengths, vocab_size=200_000, seed=seed)
        prompts = [{"prompt_token_ids": prompt} for prompt in tokens]
        params = SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        started = time.monotonic()
        outputs = llm.generate(prompts, params)
        seconds = time.monotonic() - started
        assert all(len(o.outputs[0].token_ids) == new for o in outputs)
        return seconds

    # A chunk longer than the window, a decode batch, and what they compile.
    timed([min(1500, max(job["lengths"])), 200, 100, 100], 8, seed=0)
    ready = time.monotonic()

    running: list[int] = []
    preempted = 0
    schedule = scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal preempted
        output = schedule(*args, **kwargs)
        running.append(len(scheduler.running))
        preempted += len(output.preempted_req_ids or ())
        return output

    scheduler.schedule = watched
    seconds = timed(job["lengths"], job["new"], seed=1)
    figures = dict(
        seconds=seconds,
        output_tok_s=len(job["lengths"]) * job["new"] / seconds,
        prompt_tok_s=sum(job["lengths"]) / seconds,
        steps=len(running),
        mean_running=sum(running) / len(running),
        preemptions=preempted,
        start_s=ready - started,
    )
    out.write(json.dumps(figures))
    out.close()
    llm.llm_engine.engine_core.shutdown()


def run(name: str, regime: Regime, dtype: str, eager: bool) -> list[dict]:
    """Rows of one regime, stock's and ring's: medians, spread and the bar."""
    taken: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}

    def runs(backend: str):
        def once() -> float:
            number = len(taken[backend]) + 1
            print(
                f"{name}: {backend}, round {number} of {regime.rounds}", file=sys.stderr
            )
            figures = measure(regime, backend, dtype, eager)
            taken[backend].append(figures)
            print(
                f"{name}: {backend}, {figures['seconds']:.1f} s, "
                f"{figures[regime.rate]:.1f} {regime.rate}",
                file=sys.stderr,
            )
            return figures[regime.rate]

        return once

    rates = alternate({backend: runs(backend) for backend in BACKENDS}, regime.rounds)
    rows: list[dict] = []
    for backend, all_figures in taken.items():
        middle = {
            key: spread([figures[key] for figures in all_figures])["median"]
            for key in all_figures[0]
        }
        rate = spread(rates[backend])
        rows.append(
            dict(
                regime=name,
                backend=backend,
                dtype=dtype,
                output_tok_s=middle["output_tok_s"],
                prompt_tok_s=middle["prompt_tok_s"],
                spread=(rate["max"] - rate["min"]) / rate["median"],
                seconds=middle["seconds"],
                steps=int(middle["steps"]),
                mean_running=middle["mean_running"],
                preemptions=int(middle["preemptions"]),
                all_rates=[round(r, 2) for r in rates[backend]],
                prompts=regime.num_prompts,
                prompt_tokens=sum(regime.prompt_lengths()),
                new_tokens=regime.num_prompts * regime.new,
            )
        )
    ratio = spread(rates["ring"])["median"] / spread(rates["stock"])["median"]
    verdict = "pass" if ratio >= regime.bar else "FAIL"
    rows[-1] |= dict(ratio=ratio, bar=regime.bar, verdict=verdict)
    return rows


def draw(rows: list[dict]) -> Any:
    """Output tokens per second of each regime, stock = 1."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["regime"] for row in rows))
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for shift, backend in ((-0.2, "stock"), (0.2, "ring")):
        for place, name in enumerate(names):
            by = {r["backend"]: r["all_rates"] for r in rows if r["regime"] == name}
            stock = spread(by["stock"])["median"]
            rate = {key: value / stock for key, value in spread(by[backend]).items()}
            middle = rate["median"]
            error = [[middle - rate["min"]], [rate["max"] - middle]]
            colour, label = COLOURS[backend], None if place else backend
            axes.bar(place + shift, middle, 0.38, color=colour, label=label)
            axes.errorbar(place + shift, middle, error, color="black", capsize=3)
            axes.text(place + shift, 0.05, f"{middle:.2f}", ha="center", color="white")
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="tokens/s, stock = 1", title="Gemma 3 270M, LLM.generate")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", ncols=2)
    axes.set_ylim(top=1.2 * axes.get_ylim()[1])
    figure.tight_layout()
    return figure


def main() -> int:
    options = parser("LLM.generate, stock against ring: tokens per second")
    options.add_argument("--regime", action="append", choices=list(REGIMES))
    options.add_argument("--rounds", type=int, help="of each, in every regime")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--eager", action="store_true", help="do not compile")
    options.add_argument("--check", action="store_true", help="exit 1 on a missed bar")
    options.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.child:
        child()
        return 0
    gemma3_270m()  # built before anything is timed
    regimes = REGIMES | (QUICK if args.quick else {}) | (TINY if args.tiny else {})
    rows: list[dict] = []
    for name in args.regime or REGIMES:
        regime = regimes[name]
        if args.rounds:
            regime = replace(regime, rounds=args.rounds)
        rows += run(name, regime, args.dtype, args.eager)
        show(name, rows[-2:])
    plots = [("throughput", draw(rows))] if args.save else []
    finish(args, "throughput", rows, model="gemma3-270m", plots=plots)
    judged = [row for row in rows if "bar" in row]
    for row in judged:
        print(
            f"{row['verdict']}: {row['regime']}: ring/stock {row['ratio']:.3f}, "
            f"bar {row['bar']:.2f}",
            file=sys.stderr,
        )
    missed = any(row["verdict"] == "FAIL" for row in judged)
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
