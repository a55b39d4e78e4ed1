# SPDX-License-Identifier: Apache-2.0
"""Offline jobs: ``vllm-ringwindow batch`` and ``LLM.generate``, ring and stock.

Measured: wall-clock seconds of whole commands, start-up and all, on the same rows. A
job of one row tells what start-up takes; the rest is work. The part ``overhead`` is one
replica with rings against ``LLM.generate`` with rings, in turn, with memory for all
rows. The part ``memory`` has stock and rings, one replica and two, and for each replica
so few blocks that stock runs few rows at once; two replicas share the machine's cores.

    python -m benchmarks.batch --quick
    python -m benchmarks.batch --part overhead --rounds 2
"""

import os
import sys
from pathlib import Path

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import json
import random
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.common import ROOT, alternate, finish, parser, show, spread
from benchmarks.models import gemma3_270m

BACKENDS = {"stock": "CPU_ATTN", "ring": "RING"}
PARTS = ("overhead", "memory")
BAR = 1.10  # of overhead, on a job of two minutes


@dataclass(frozen=True)
class Work:
    """Rows of a job: ``words`` of prompt, shortest and longest; ``new`` tokens each."""

    rows: int
    words: tuple[int, int]
    new: int
    options: dict[str, Any]

    def write(self, path: Path, rows: int | None = None) -> None:
        rng = random.Random(0)
        text = (ROOT / "docs" / "design.md").read_text().split()
        with path.open("w") as out:
            for _ in range(rows or self.rows):
                count = rng.randint(*self.words)
                start = rng.randrange(len(text) - count)
                prompt = " ".join(text[start : start + count])
                out.write(json.dumps({"prompt": prompt}) + "\n")

    @property
    def sampling(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": self.new, "ignore_eos": True}


COMMON = dict(max_model_len=4096, enforce_eager=True, block_size=128)
AMPLE = COMMON | dict(kv_cache_memory_bytes=4 << 30)
TIGHT = AMPLE | dict(num_gpu_blocks_override=200)
WORK = {
    "overhead": Work(144, (100, 300), 128, AMPLE),
    "memory": Work(48, (500, 1500), 64, TIGHT),
}
QUICK = {
    "overhead": Work(36, (100, 300), 128, AMPLE),
    "memory": Work(16, (500, 1500), 32, TIGHT),
}


def generate(work: Work, given: Path, backend: str) -> None:
    """What ``python -m benchmarks.batch --child`` does: the same rows, without Ray."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(gemma3_270m()),
        attention_backend=backend,
        disable_log_stats=True,
        **work.options,
    )
    prompts = [json.loads(line)["prompt"] for line in given.read_text().splitlines()]
    outputs = llm.generate(prompts, SamplingParams(**work.sampling), use_tqdm=False)
    assert all(len(o.outputs[0].token_ids) == work.new for o in outputs)


def environment() -> dict[str, str]:
    quiet = dict(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
    return os.environ | quiet | {"HF_HUB_OFFLINE": "1"}


def bare(work: Work, given: Path, backend: str) -> float:
    """Seconds of a process that calls ``LLM.generate``."""
    job = json.dumps(dict(vars(work), given=str(given), backend=backend))
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "benchmarks.batch", "--child"],
        input=job,
        text=True,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.monotonic() - started


def batch(work: Work, given: Path, backend: str, replicas: int) -> float:
    """Seconds of ``vllm-ringwindow batch``."""
    command = Path(sys.executable).parent / "vllm-ringwindow"
    options = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in (work.options | dict(disable_log_stats=True)).items()
    ]
    with tempfile.TemporaryDirectory() as out:
        started = time.monotonic()
        subprocess.run(
            [
                *(command, "batch", given, out, "--model", gemma3_270m()),
                *("--attention-backend", backend, "--replicas", str(replicas)),
                *("--sampling", json.dumps(work.sampling), *options),
            ],
            env=environment(),
            stderr=subprocess.DEVNULL,
            check=True,
        )
        seconds = time.monotonic() - started
        lines = (Path(out) / "results.jsonl").read_text().splitlines()
        expected = len(given.read_text().splitlines())
        assert len(lines) == expected, "a row is missing"
        assert all(json.loads(line)["error"] is None for line in lines)
    return seconds


def run(part: str, work: Work, rounds: int) -> list[dict[str, Any]]:
    """One row for each way of running a part."""
    ways: dict[str, Any] = {}
    if part == "overhead":
        ways["LLM.generate, ring"] = lambda path: bare(work, path, "RING")
        ways["batch, ring"] = lambda path: batch(work, path, "RING", 1)
    else:
        for replicas in (1, 2):
            for name, backend in BACKENDS.items():
                ways[f"batch, {name}, replicas {replicas}"] = (
                    lambda path, b=backend, n=replicas: batch(work, path, b, n)
                )
    with tempfile.TemporaryDirectory() as folder:
        whole, one = Path(folder) / "rows.jsonl", Path(folder) / "one.jsonl"
        work.write(whole)
        work.write(one, 1)

        def told(name: str, path: Path):
            def once() -> float:
                seconds = ways[name](path)
                print(f"{part}: {name}: {path.stem} {seconds:.1f} s", file=sys.stderr)
                return seconds

            return once

        first = alternate({name: told(name, one) for name in ways}, 1)
        taken = alternate({name: told(name, whole) for name in ways}, rounds)
    rows = []
    for name in ways:
        seconds = spread(taken[name])
        start = first[name][0]
        at_work = max(seconds["median"] - start, 1e-9)
        rows.append(
            dict(
                part=part,
                way=name,
                rows=work.rows,
                seconds=seconds["median"],
                spread=(seconds["max"] - seconds["min"]) / seconds["median"],
                one_row_s=start,
                rows_s=work.rows / seconds["median"],
                tok_s=work.rows * work.new / seconds["median"],
                tok_s_at_work=(work.rows - 1) * work.new / at_work,
            )
        )
    for base, row in zip(rows[::2], rows[1::2]):
        row["time_ratio"] = row["seconds"] / base["seconds"]
    if part == "overhead":
        rows[-1] |= dict(
            bar=BAR, verdict="pass" if rows[-1]["time_ratio"] <= BAR else "FAIL"
        )
    return rows


def child() -> None:
    job = json.load(sys.stdin)
    given, backend = Path(job.pop("given")), job.pop("backend")
    generate(Work(**job), given, backend)


def main() -> int:
    options = parser("offline jobs: whole commands, on the same rows")
    options.add_argument("--part", action="append", choices=PARTS)
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--check", action="store_true", help="exit 1 on a missed bar")
    options.add_argument("--child", action="store_true", help="(used internally)")
    args = options.parse_args()
    if args.child:
        child()
        return 0
    gemma3_270m()  # built before anything is timed
    rows: list[dict[str, Any]] = []
    for part in args.part or PARTS:
        found = run(part, (QUICK if args.quick else WORK)[part], args.rounds)
        show(part, found)
        rows += found
    name = "batch" if not args.part else "batch_" + "_".join(args.part)
    finish(args, name, rows, model="gemma3-270m")
    return int(args.check and any(row.get("verdict") == "FAIL" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
