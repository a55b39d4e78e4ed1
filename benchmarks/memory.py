# SPDX-License-Identifier: Apache-2.0
"""KV held by one request against the tokens it generated, counted at every step.

Counted: blocks, and bytes (MiB), that the request holds in the scheduler's pool once a
step has been scheduled, in the sliding-window layers and in all layers. Exact and the
same on every run: nothing is timed. Four lines: stock with the hybrid KV cache manager
off (every layer grows), stock, ring, and what ``W`` tokens of those layers fill.

A tiny Gemma 3 (5 sliding-window layers, 1 full, W = 64, blocks of 32 tokens) unless
``--model`` names another, ``gemma3_270m`` for instance. A block is one of stock's, also
where the hybrid manager is off and vLLM's own are larger. ``generated`` is 0 for the
steps of prefill, of which a row gives the largest; rows are a few steps, the plot has
all.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import gc
import os
import tempfile
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")

# Sets what vLLM reads at import.
from benchmarks.demo import COLOURS, ENGINES, Step, answer, watch

# isort: split
from matplotlib.figure import Figure
from rich.console import Console
from vllm import LLM
from vllm.v1.kv_cache_interface import KVCacheSpec

from benchmarks.common import finish, parser
from benchmarks.models import gemma3_270m, random_prompts, tiny_model
from vllm_ringwindow.geometry import ring_blocks

TINY_W = 64  # tokens
TINY: dict[str, Any] = dict(block_size=32)
NAMES = {"hybrid off": "stock, hybrid manager off", "stock": "stock", "ring": "ring"}


@dataclass
class Run:
    """One engine's steps. Bytes are of all sliding-window layers together."""

    steps: list[Step]
    block_size: int  # tokens
    block_bytes: float
    window: int  # tokens
    token_bytes: float  # of one token


def run_engine(name: str, model: Path, prompt: list[int], new: int, **options) -> Run:
    """One request alone, watched."""
    llm = LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=1 << 30,
        use_tqdm_on_load=False,
        **options,
        **ENGINES[name],
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context
    sliding = [n for n, layer in layers.items() if layer.sliding_window is not None]
    kv = scheduler.kv_cache_manager.kv_cache_config
    token_bytes = 0.0
    for group in kv.kv_cache_groups:
        spec: KVCacheSpec = group.kv_cache_spec
        number = len(set(group.layer_names) & set(sliding))
        token_bytes += number * spec.page_size_bytes / spec.block_size
    run = Run(
        steps=[],
        block_size=config.cache_config.block_size,
        block_bytes=max(t.size for t in kv.kv_cache_tensors) / kv.num_blocks,
        window=layers[sliding[0]].sliding_window,
        token_bytes=token_bytes,
    )
    watch(llm, run.steps)
    answer(llm.llm_engine, [prompt], new, lambda: None)
    llm.llm_engine.engine_core.shutdown()
    del llm, scheduler.schedule, scheduler
    gc.collect()
    return run


def rows_of(runs: dict[str, Run], length: int, new: int) -> list[dict]:
    """The largest step of prefill and eight steps of decode of each engine, and W."""

    def row(name: str, generated: int, **held: float) -> dict:
        blocks = {f"{key}_blocks": round(b / block_bytes, 1) for key, b in held.items()}
        mib = {f"{key}_mib": b / 2**20 for key, b in held.items()}
        return dict(engine=name, generated=generated) | blocks | mib

    rows = []
    block_bytes = runs["stock"].block_bytes
    for name, run in runs.items():
        prefill = [s for s in run.steps if s.num_tokens <= length]
        largest = max(prefill, key=lambda s: s.total)
        rows.append(row(name, 0, sliding=largest.sliding, all=largest.total))
        for i in range(1, 9):
            at = new * i // 8 - 1  # the last token is sampled and never stored
            step = next(s for s in run.steps if s.num_tokens == length + at)
            rows.append(row(name, at, sliding=step.sliding, all=step.total))
    bound = runs["stock"].window * runs["stock"].token_bytes
    return [*rows, row(f"W = {runs['stock'].window} tokens", 0, sliding=bound)]


def draw(runs: dict[str, Run], length: int) -> Figure:
    """Every step: sliding-window layers on the left, all layers on the right."""
    figure = Figure(figsize=(10, 4.4))
    left, right = figure.subplots(1, 2)
    for name, run in runs.items():
        order = list(NAMES).index(name)
        style = dict(color=COLOURS[name], lw=4 - order, zorder=2 + order)
        x = [s.num_tokens - length for s in run.steps]
        for axes, part in ((left, "sliding"), (right, "total")):
            y = [getattr(s, part) / 2**20 for s in run.steps]
            axes.step(x, y, where="post", label=NAMES[name], **style)
    stock = runs["stock"]
    bound = stock.window * stock.token_bytes / 2**20
    left.axhline(bound, color="black", lw=1, ls="--", label=f"{stock.window} tokens")
    for axes, title in ((left, "sliding-window layers"), (right, "all layers")):
        axes.set(xlabel="generated tokens", ylabel="MiB held", title=title)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    figure.suptitle(f"KV of one request, prompt of {length} tokens, float32")
    figure.tight_layout()
    return figure


def main() -> int:
    options = parser("KV blocks and bytes of one request, token by token")
    options.add_argument("--model", help="a directory, or gemma3_270m")
    options.add_argument("--prompt", type=int, help="tokens (default 8 W)")
    options.add_argument(
        "--new",
        type=int,
        help="tokens (default 16 W, quick 4 W; with --model 4 W, quick 1 W)",
    )
    options.add_argument("--check", action="store_true", help="exit 1 on a missed bar")
    args = options.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as scratch:
        if args.model is None:
            model = tiny_model("gemma3", scratch, window=TINY_W)
            name, window, engine_options = "tiny-gemma3", TINY_W, TINY
            windows = 4 if args.quick else 16
        else:
            real = args.model == "gemma3_270m"
            model = gemma3_270m() if real else Path(args.model)
            name = "gemma3-270m" if real else model.name
            window, engine_options = 512, {}
            windows = 1 if args.quick else 4
        length = args.prompt or 8 * window
        new = args.new or windows * window
        if new < 8 or length + new > 8192:
            options.error(f"--prompt {length} --new {new}: at most 8192, 8 of them new")
        (prompt,) = random_prompts([length])
        runs = {}
        for engine in NAMES:
            Console(stderr=True).print(f"{engine}: {length} + {new} tokens")
            runs[engine] = run_engine(engine, model, prompt, new, **engine_options)
    plots = [("memory", draw(runs, length))] if args.save else []
    finish(args, "memory", rows_of(runs, length, new), model=name, plots=plots)
    ring = runs["ring"]
    full = ring_blocks(ring.window, ring.block_size)
    most = max(max(step.blocks) for step in ring.steps)
    verdict = "pass" if most <= full else "FAIL"
    print(
        f"{verdict}: ring: at most {most} blocks in a group at any step, R = {full}",
        file=sys.stderr,
    )
    return 1 if args.check and most > full else 0


if __name__ == "__main__":
    sys.exit(main())
