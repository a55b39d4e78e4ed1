# SPDX-License-Identifier: Apache-2.0
"""``vllm bench serve`` against ``vllm serve`` on Gemma 3 270M, stock and ring.

Measured by vLLM's own client at three concurrencies: TTFT, TPOT and ITL (milliseconds,
median, p90, p99), output tokens per second, requests per second that met the goals
(goodput; the goals are in the rows). The dataset is vLLM's ``random`` one, the same for
both backends. Servers run one at a time, stock and ring in turn, a fresh one each
round; with ``--rounds`` above 1 a row is the median of the rounds.

A server's blocks are limited, as they are where serving is hard: 330 of 128 tokens.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from benchmarks.common import finish, parser, spread
from benchmarks.models import gemma3_270m

VLLM = str(Path(sys.executable).parent / "vllm")
BACKENDS = {"stock": [], "ring": ["--attention-backend", "ring"]}
SERVER = {
    "--dtype": "bfloat16",
    "--block-size": "128",
    "--max-model-len": "8192",
    "--max-num-batched-tokens": "4096",
    "--kv-cache-memory-bytes": str(1 << 30),
    "--num-gpu-blocks-override": "330",
}
GOALS = {"ttft": 10_000, "tpot": 200}  # milliseconds
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",  # says whether rings are in use
}
METRICS = ("ttft", "tpot", "itl")
FIGURES = {
    "output_tok_s": "output_throughput",
    "goodput_req_s": "request_goodput",
    **{
        f"{metric}_p{percent}": f"p{percent}_{metric}_ms"
        for metric in METRICS
        for percent in (50, 90, 99)
    },
}
COLOURS = {"stock": "#d95f02", "ring": "#1b6ca8"}


@dataclass(frozen=True)
class Load:
    """What the client sends. Lengths in tokens, each varied by +-25%."""

    concurrencies: tuple[int, ...]
    input_len: int
    output_len: int
    prompts_per_client: int  # requests = concurrency times this


FULL = Load((1, 4, 16), 3000, 128, 3)
QUICK = Load((1, 4, 16), 1000, 16, 1)
WARM_UP = Load((), 1000, 8, 1)
TINY = Load((1, 2, 4), 300, 4, 1)  # to try the script itself, not to learn anything


@contextmanager
def server(model: Path, backend: str, eager: bool) -> Iterator[str]:
    """``vllm serve`` until the block ends; yields its address."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [VLLM, "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += [part for option in SERVER.items() for part in option]
    command += BACKENDS[backend] + (["--enforce-eager"] if eager else [])
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | ENVIRONMENT
        )

        def said() -> str:
            log.seek(0)
            return log.read()

        try:
            deadline = time.monotonic() + 900
            while True:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"vllm serve did not start:\n{said()[-4000:]}")
                with suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(f"{url}/health", timeout=5)
                    break
                time.sleep(1)
            rings = "ring: on rings: " in said()
            if rings != (backend == "ring"):
                raise RuntimeError(f"backend {backend}: rings in use: {rings}")
            yield url
        finally:
            process.terminate()
            process.wait(60)


def bench(url: str, model: Path, backend: str, load: Load, clients: int, seed: int):
    """One run of vLLM's client; its result as it saved it."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "--backend": "openai",
            "--base-url": url,
            "--model": str(model),
            "--dataset-name": "random",
            "--random-input-len": load.input_len,
            "--random-output-len": load.output_len,
            "--random-range-ratio": 0.25,
            "--num-prompts": clients * load.prompts_per_client,
            "--max-concurrency": clients,
            "--seed": seed,
            "--percentile-metrics": ",".join(METRICS),
            "--metric-percentiles": "50,90,99",
            "--metadata": f"attention_backend={backend}",
            "--result-dir": folder,
            "--result-filename": "result.json",
        }
        command = [VLLM, "bench", "serve", "--ignore-eos", "--save-result"]
        command += [str(part) for option in options.items() for part in option]
        command += ["--goodput", *(f"{name}:{ms}" for name, ms in GOALS.items())]
        done = subprocess.run(
            [*command, "--disable-tqdm"],
            capture_output=True,
            text=True,
            env=os.environ | ENVIRONMENT,
        )
        if done.returncode:
            raise RuntimeError(
                f"vllm bench serve:\n{(done.stdout + done.stderr)[-4000:]}"
            )
        return json.loads((Path(folder) / "result.json").read_text())


def measure(load: Load, rounds: int, eager: bool) -> list[dict]:
    """One row per concurrency and backend."""
    model = gemma3_270m()
    results: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for number in range(rounds):
        for backend in BACKENDS:
            say(f"{backend}, round {number + 1} of {rounds}: starting")
            with server(model, backend, eager) as url:
                # Not the client's --num-warmups, which sends the first prompt twice:
                # the second time it would be in the prefix cache.
                bench(url, model, backend, WARM_UP, clients=2, seed=99)
                for clients in load.concurrencies:
                    # New prompts each time: none is in the prefix cache.
                    seed = 100 * number + clients
                    result = bench(url, model, backend, load, clients, seed)
                    results.setdefault((clients, backend), []).append(result)
                    say(f"{backend}, {clients} clients: {result['duration']:.1f} s")
    rows = []
    for clients in load.concurrencies:
        for backend in BACKENDS:
            of = results[clients, backend]
            if any(r["failed"] for r in of):
                raise RuntimeError(f"{backend}, {clients} clients: requests failed")
            row = dict(clients=clients, backend=of[0]["attention_backend"])
            row |= {
                name: spread([r[key] for r in of])["median"]
                for name, key in FIGURES.items()
            }
            row |= dict(
                requests=sum(r["completed"] for r in of),
                input_tokens=sum(r["total_input_tokens"] for r in of),
                output_tokens=sum(r["total_output_tokens"] for r in of),
                goals_ms=" ".join(f"{name}:{ms}" for name, ms in GOALS.items()),
            )
            rows.append(row)
    return rows


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def draw(rows: list[dict]) -> Any:
    """Medians of the latencies, with p99 as the line's end, and output tokens/s."""
    from matplotlib.figure import Figure

    clients = list(dict.fromkeys(row["clients"] for row in rows))
    figure = Figure(figsize=(11, 3.6))
    for axes, name in zip(figure.subplots(1, 4), (*METRICS, "output_tok_s")):
        for shift, backend in ((-0.2, "stock"), (0.2, "ring")):
            of = [row for row in rows if row["backend"] == backend]
            x = [place + shift for place in range(len(clients))]
            key = name if name == "output_tok_s" else f"{name}_p50"
            middle = [row[key] for row in of]
            axes.bar(x, middle, 0.38, color=COLOURS[backend], label=backend)
            if name in METRICS:
                high = [row[f"{name}_p99"] for row in of]
                axes.vlines(x, middle, high, color="black", lw=1)
        axes.set_xticks(range(len(clients)), clients)
        title = "output tokens/s" if name == "output_tok_s" else f"{name.upper()} (ms)"
        axes.set(title=title, xlabel="clients")
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.suptitle("vllm bench serve, Gemma 3 270M: median, line to p99")
    figure.tight_layout()
    return figure


def main() -> int:
    options = parser("vllm bench serve against vllm serve, stock and ring")
    options.add_argument("--rounds", type=int, help="of each (default 3; quick 1)")
    options.add_argument("--eager", action="store_true", help="do not compile")
    options.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args()
    load = TINY if args.tiny else QUICK if args.quick else FULL
    rows = measure(load, args.rounds or (1 if args.quick else 3), args.eager)
    plots = [("serve", draw(rows))] if args.save else []
    finish(args, "serve", rows, model="gemma3-270m", plots=plots)
    return 0


if __name__ == "__main__":
    sys.exit(main())
