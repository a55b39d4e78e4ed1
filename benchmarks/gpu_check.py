# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can tell, in at most ten minutes: stages of rising cost.

No downloads: random weights at a real shape (Gemma 3 1B). ``view`` needs torch and
Triton alone; the others need vLLM and this package. ``parity`` is the checklist of
``vllm-ringwindow verify`` around one backend's kernels, eager or with CUDA graphs;
``speed`` is tokens per second and KV memory, stock and ring in turn.

    python benchmarks/gpu_check.py --dry-run
    python benchmarks/gpu_check.py --json gpu.json
    python benchmarks/gpu_check.py --stages view,parity-flash

Exit code 1 if a stage fails. ``--cpu`` tries the script itself on a CPU.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

# The engines run in processes of their own.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

Row = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """One stage; ``minutes`` is an estimate for one H200-class GPU."""

    name: str
    minutes: float
    needs: tuple[str, ...]
    about: str
    run: Callable[["Setting"], list[Row]]


@dataclass(frozen=True)
class Setting:
    """Where and how large."""

    device: str
    model: Path | None  # a directory with a config.json and no weights
    engine: dict[str, Any]


# -- view ------------------------------------------------------------------------------


def view(setting: Setting) -> list[Row]:
    """The fused kernel against its reference: equal, and how fast."""
    import torch

    from vllm_ringwindow.attention.view import view_reference

    if setting.device == "cpu":
        fused = view_reference
    else:
        from vllm_ringwindow.attention.view_kernel import view_fused as fused
    rows = []
    for batch, ring, window, block in ((8, 65, 1024, 16), (256, 65, 1024, 16)):
        generator = torch.Generator().manual_seed(batch)
        table = torch.randint(0, 1 << 20, (batch, 8192), generator=generator)
        lens = torch.randint(1, 8192 * block, (batch,), generator=generator)
        lens[-1] = 0
        starts = torch.arange(batch + 1).clamp(max=batch - 1)
        table, lens, starts = (
            x.int().to(setting.device) for x in (table, lens, starts)
        )
        found = {}
        for name, make in (("reference", view_reference), ("fused", fused)):
            out = torch.zeros(batch, ring, dtype=torch.int32, device=setting.device)
            out_lens = torch.zeros(batch, dtype=torch.int32, device=setting.device)
            args = (table, lens, starts, out, out_lens, window, block)
            seconds = _time(lambda make=make, args=args: make(*args), setting.device)
            found[name] = (out, out_lens, seconds)
        same = all(torch.equal(a, b) for a, b in zip(*(f[:2] for f in found.values())))
        rows.append(
            dict(
                what=f"view of {batch} rows, R = {ring}",
                passed=same,
                reference_us=found["reference"][2] * 1e6,
                fused_us=found["fused"][2] * 1e6,
            )
        )
    return rows


def _time(call: Callable[[], None], device: str, repeats: int = 100) -> float:
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(10):
        call()
    wait()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - started) / repeats


# -- parity ----------------------------------------------------------------------------


def parity(backend: str, graphs: bool) -> Callable[[Setting], list[Row]]:
    """The checklist with one backend's kernels inside the ring."""

    def run(setting: Setting) -> list[Row]:
        from vllm_ringwindow.verification import ask, compare

        stock = _engine(setting, backend, ring=False, graphs=graphs)
        ring = _engine(setting, backend, ring=True, graphs=graphs)
        answers = []
        for number, engine in enumerate((stock, ring, stock)):
            job = dict(engine=engine, text=None, fault=None, brief=number == 2)
            answers.append(ask(job, lambda text: None))
        found = compare(str(setting.model), *answers)
        where = f"{backend}, {'CUDA graphs' if graphs else 'eager'}"
        return [
            dict(
                what=f"{where}: {check.name}",
                passed=check.passed,
                found=check.found,
                allowed=check.allowed,
                hint=check.hint,
            )
            for check in found.checks
        ]

    return run


def _engine(setting: Setting, backend: str, ring: bool, graphs: bool) -> dict:
    """Engine options: ``backend`` everywhere, with rings around it or not."""
    attention: dict[str, Any] = {"backend": backend}
    if backend == "FLASHINFER":
        attention["use_trtllm_attention"] = False  # else rings pass through
    if ring:
        attention["backend_per_kind"] = {"sliding_window": "RING"}
    return dict(
        model=str(setting.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=not graphs,
        attention_config=attention,
        **setting.engine,
    )


# -- speed -----------------------------------------------------------------------------


def speed(backend: str, graphs: bool) -> Callable[[Setting], list[Row]]:
    """Decode and prefill, two rounds of stock and ring in turn, and what fits."""

    def run(setting: Setting) -> list[Row]:
        import subprocess

        found: dict[str, list[Row]] = {"stock": [], "ring": []}
        for _ in range(2):
            for name, measured in found.items():
                job = dict(engine=_engine(setting, backend, name == "ring", graphs))
                done = subprocess.run(
                    [sys.executable, __file__, "--child"],
                    input=json.dumps(job),
                    capture_output=True,
                    text=True,
                )
                if done.returncode:
                    raise RuntimeError(done.stderr[-2000:])
                measured.append(json.loads(done.stdout.splitlines()[-1]))
        rows = []
        for what in ("decode_tok_s", "prefill_tok_s", "concurrency"):
            best = {name: max(m[what] for m in ms) for name, ms in found.items()}
            rows.append(
                dict(
                    what=f"{backend}: {what}",
                    passed=True,
                    **best,
                    ratio=best["ring"] / best["stock"],
                )
            )
        return rows

    return run


def child() -> None:
    """Measure one engine; the figures are the last line of stdout."""
    import random

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.plugins import load_general_plugins
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    job = json.load(sys.stdin)
    load_general_plugins()  # LLM() reads an attention_config before it does so itself
    llm = LLM(**job["engine"])
    rng = random.Random(0)
    model = llm.llm_engine.vllm_config.model_config
    longest, words = model.max_model_len, min(model.get_vocab_size(), 1000)

    def timed(num: int, length: int, new: int) -> float:
        prompts = [
            {"prompt_token_ids": [rng.randrange(3, words) for _ in range(length)]}
            for _ in range(num)
        ]
        params = SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started

    timed(4, longest // 4, 8)
    new, batch = min(256, longest // 4), 64 if longest > 4096 else 4
    decode = timed(batch, longest // 8, new) - timed(batch, longest // 8, 1)
    prefill = timed(8, longest // 2, 1)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    config = scheduler.kv_cache_manager.kv_cache_config
    _, concurrency = get_kv_cache_capacity(llm.llm_engine.vllm_config, config)
    figures = dict(
        decode_tok_s=batch * (new - 1) / max(decode, 1e-9),
        prefill_tok_s=8 * (longest // 2) / prefill,
        concurrency=concurrency,
    )
    print("\n" + json.dumps(figures), flush=True)


# -- the whole -------------------------------------------------------------------------

VLLM = ("torch", "vllm", "vllm_ringwindow")


def stages(cpu: bool) -> list[Stage]:
    """In order of cost."""
    if cpu:
        return [
            Stage("view", 0.1, ("torch",), "the view's reference", view),
            Stage("parity-cpu", 1, VLLM, "CPU_ATTN, eager", parity("CPU_ATTN", False)),
            Stage("speed-cpu", 2, VLLM, "CPU_ATTN, eager", speed("CPU_ATTN", False)),
        ]
    return [
        Stage(
            "view",
            0.2,
            ("torch", "triton"),
            "the fused view kernel, equal and faster",
            view,
        ),
        Stage(
            "parity-triton",
            1.5,
            VLLM,
            "TRITON_ATTN, eager, 15 checks",
            parity("TRITON_ATTN", False),
        ),
        Stage(
            "parity-flash",
            1.5,
            VLLM,
            "FLASH_ATTN, eager, 15 checks",
            parity("FLASH_ATTN", False),
        ),
        Stage(
            "graphs-flash",
            2.0,
            VLLM,
            "FLASH_ATTN, CUDA graphs captured and replayed, 15 checks",
            parity("FLASH_ATTN", True),
        ),
        Stage(
            "graphs-flashinfer",
            2.0,
            (*VLLM, "flashinfer"),
            "FLASHINFER, CUDA graphs captured and replayed, 15 checks",
            parity("FLASHINFER", True),
        ),
        Stage(
            "speed",
            2.5,
            VLLM,
            "FLASH_ATTN, CUDA graphs: decode, prefill, maximum concurrency",
            speed("FLASH_ATTN", True),
        ),
    ]


def setting_for(cpu: bool, scratch: str) -> Setting:
    """Gemma 3 1B's shape without weights; with ``cpu`` a tiny one."""
    if find_spec("vllm") is None:
        return Setting("cpu" if cpu else "cuda", None, {})
    if cpu:
        from benchmarks.models import tiny_model

        model = tiny_model("gemma3", scratch, window=64)
        engine = dict(
            dtype="float32",
            block_size=32,
            max_model_len=1024,
            kv_cache_memory_bytes=1 << 27,
        )
        return Setting("cpu", model, engine)
    from benchmarks.shapes import SHAPES

    SHAPES["gemma3-1b"].config.save_pretrained(scratch)
    engine = dict(max_model_len=16384, kv_cache_memory_bytes=8 << 30)
    return Setting("cuda", Path(scratch), engine)


def missing(stage: Stage, device: str) -> list[str]:
    lacking = [name for name in stage.needs if find_spec(name) is None]
    if device == "cuda" and not lacking:
        import torch

        if not torch.cuda.is_available():
            lacking.append("a GPU")
    return lacking


def main() -> int:
    if "--child" in sys.argv:
        child()
        return 0
    options = argparse.ArgumentParser(description="What only a GPU can tell")
    options.add_argument("--dry-run", action="store_true", help="list the stages")
    options.add_argument("--stages", help="names, separated by commas (default: all)")
    options.add_argument(
        "--minutes", type=float, default=10, help="start no stage that would end later"
    )
    options.add_argument("--json", metavar="FILE", help="'-' is stdout")
    options.add_argument("--cpu", action="store_true", help="try the script on a CPU")
    args = options.parse_args()
    known = stages(args.cpu)
    wanted = args.stages.split(",") if args.stages else [s.name for s in known]
    if unknown := sorted(set(wanted) - {s.name for s in known}):
        options.error(f"--stages: unknown {', '.join(unknown)}")
    chosen = [stage for stage in known if stage.name in wanted]
    device = "cpu" if args.cpu else "cuda"
    if args.dry_run:
        for stage in chosen:
            lacks = missing(stage, device)
            print(
                f"{stage.name:18} {stage.minutes:4.1f} min  needs "
                f"{', '.join(stage.needs)}: {stage.about}"
                + (f"  (here missing: {', '.join(lacks)})" if lacks else "")
            )
        print(f"{'all':18} {sum(s.minutes for s in chosen):4.1f} min")
        return 0
    return run_stages(chosen, args, device)


def run_stages(chosen: list[Stage], args: argparse.Namespace, device: str) -> int:
    """Run, print as it goes, write JSON after each stage."""
    started = time.monotonic()
    result: dict[str, Any] = {"device": _device_name(device), "stages": {}}
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        setting = setting_for(args.cpu, scratch)
        for stage in chosen:
            spent = (time.monotonic() - started) / 60
            if lacks := missing(stage, device):
                outcome: Any = f"not run: missing {', '.join(lacks)}"
            elif spent + stage.minutes > args.minutes:
                outcome = f"not run: {spent:.1f} of {args.minutes:g} minutes are spent"
            else:
                try:
                    outcome = stage.run(setting)
                except Exception as error:
                    traceback.print_exc()
                    outcome = f"failed: {type(error).__name__}: {error}"
                    failed = True
            result["stages"][stage.name] = outcome
            for row in outcome if isinstance(outcome, list) else [outcome]:
                print(f"{stage.name}: {row}", file=sys.stderr)
                failed |= isinstance(row, dict) and not row["passed"]
            if args.json and args.json != "-":
                Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if args.json == "-":
        print(json.dumps(result, indent=1))
    return 1 if failed else 0


def _device_name(device: str) -> str:
    if device == "cuda" and find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
    return device


if __name__ == "__main__":
    sys.exit(main())
