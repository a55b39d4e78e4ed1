# SPDX-License-Identifier: Apache-2.0
"""``make demo``: Gemma 3 270M with rings and without, texts and memory compared.

Three engines: stock vLLM, the ring, and stock with the hybrid KV cache manager off (for
memory).  Greedy and in float32, so that texts can be compared exactly: in bfloat16
rounding alone may turn one.  Exit code 0 iff they agree and the ring's memory is flat.
"""

import os

# Read by vLLM at import.  In-process engines can be looked into after every step.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Threads that wait and spin are slow on a machine that is shared.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from rich.table import Table
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm import __version__ as vllm_version

from benchmarks.models import gemma3_270m, token_prompts
from vllm_ringwindow.geometry import ring_blocks
from vllm_ringwindow.report import decision, mib

W = 512  # Gemma 3 270M's window
LENGTHS = (100, 300, 600, 1200, 2000, 3000)  # the last one is watched step by step
TEXT_TOKENS = 48
OPTIONS: dict[str, Any] = dict(
    dtype="float32",
    enforce_eager=True,
    max_model_len=8192,
    kv_cache_memory_bytes=1 << 30,
    use_tqdm_on_load=False,
)
ENGINES: dict[str, dict[str, Any]] = {
    "stock": {},
    "ring": dict(attention_backend="RING"),
    "hybrid off": dict(disable_hybrid_kv_cache_manager=True),
}
COLOURS = {"stock": "#d95f02", "ring": "#1b6ca8", "hybrid off": "#888888"}


class Step(NamedTuple):
    """What the watched request holds once a step has been scheduled."""

    num_tokens: int  # computed by the end of the step
    blocks: list[int]  # of each group with sliding-window layers
    taken: int  # from the pool in this step, by those groups
    sliding: float  # bytes, sliding-window layers
    total: float  # bytes, all layers


@dataclass
class Run:
    """One engine's answers, plan and memory."""

    block_size: int
    max_concurrency: float
    kv_tokens: int
    decision: list[str]  # the start-up lines of vllm_ringwindow.report
    texts: list[list[int]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


def watch(llm: LLM, steps: list[Step]) -> None:
    """Read the scheduler's own block lists each time it has scheduled a step."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    config = scheduler.kv_cache_manager.kv_cache_config
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    block_bytes = max(t.size for t in config.kv_cache_tensors) / config.num_blocks
    # The part of a group's layers that have a window: all, none, or 15 of 18 with
    # the hybrid manager off.
    share = [
        sum(layers[n].sliding_window is not None for n in g.layer_names)
        / len(g.layer_names)
        for g in config.kv_cache_groups
    ]
    sliding = [i for i, part in enumerate(share) if part]
    held: list[set[int]] = [set() for _ in managers]
    schedule = scheduler.schedule

    def watched(*args, **kwargs):
        nonlocal held
        output = schedule(*args, **kwargs)
        before = held
        held = [
            {b.block_id for bs in m.req_to_blocks.values() for b in bs if not b.is_null}
            for m in managers
        ]
        done = steps[-1].num_tokens if steps else 0
        step = Step(
            num_tokens=done + output.total_num_scheduled_tokens,
            blocks=[len(held[i]) for i in sliding],
            taken=sum(len(held[i] - before[i]) for i in sliding),
            sliding=sum(len(held[i]) * share[i] for i in sliding) * block_bytes,
            total=sum(map(len, held)) * block_bytes,
        )
        steps.append(step)
        return output

    scheduler.schedule = watched


def answer(engine: Any, prompts: list, num_tokens: int, on_step: Callable) -> list:
    """Greedy continuations of prompts that run together."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    answers = {}
    while engine.has_unfinished_requests():
        done = [output for output in engine.step() if output.finished]
        answers |= {o.request_id: list(o.outputs[0].token_ids) for o in done}
        on_step()
    return [answers[str(i)] for i in range(len(prompts))]


def run_engine(
    name: str, model: Path, prompts: list, num_new: int, progress: Progress
) -> Run:
    """Answer the shorter prompts together, then the last one alone, watched."""
    bar = progress.add_task(f"{name}: starting", total=None)
    llm = LLM(str(model), **OPTIONS, **ENGINES[name])
    config = llm.llm_engine.vllm_config
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    run = Run(
        block_size=config.cache_config.block_size,
        max_concurrency=config.cache_config.kv_cache_max_concurrency,
        kv_tokens=config.cache_config.kv_cache_size_tokens,
        decision=decision(config, scheduler.kv_cache_manager.kv_cache_config),
    )
    total = num_new if name == "hybrid off" else TEXT_TOKENS + num_new
    progress.update(bar, description=f"{name}: running", total=total)
    on_step = partial(progress.advance, bar)
    if name != "hybrid off":
        run.texts += answer(llm.llm_engine, prompts[:-1], TEXT_TOKENS, on_step)
    watch(llm, run.steps)
    run.texts += answer(llm.llm_engine, prompts[-1:], num_new, on_step)
    progress.update(bar, description=f"{name}: done", completed=total)
    llm.llm_engine.engine_core.shutdown()
    del llm, scheduler.schedule, scheduler
    gc.collect()
    return run


def not_flat(ring: Run, prompt_length: int) -> str | None:
    """Why the ring's line is not flat, or None.

    At no step, prefill included, more than R blocks in a group.  Once the prompt has
    left the window (its blocks kept for prefix reuse go back to the pool, for a fresh
    one each): exactly R, and no block is taken from the pool.
    """
    full = ring_blocks(W, ring.block_size)
    for tokens, blocks, taken, *_ in ring.steps:
        if max(blocks) > full:
            return f"{blocks} blocks per group at {tokens} tokens, R = {full}"
        if tokens > prompt_length + W and (min(blocks) < full or taken):
            return f"{blocks} blocks, {taken} taken, at {tokens} tokens, R = {full}"
    return None


def shorten(text: str, first: int, last: int) -> str:
    text = " ".join(text.split())
    if len(text) > first + last + 5:
        text = f"{text[:first]} ... {text[-last:]}"
    return escape(text.strip())


def print_texts(console, tokenizer, prompts, stock: Run, ring: Run) -> None:
    console.rule("Texts (greedy, float32)")
    for prompt, a, b in zip(prompts, stock.texts, ring.texts, strict=True):
        end = shorten(tokenizer.decode(prompt[-60:]), 0, 55)
        console.print(f"[bold]{len(prompt)} tokens[/] [dim]{end}[/]")
        for name, tokens in (("stock", a), ("ring ", b)):
            console.print(f"  {name}  {shorten(tokenizer.decode(tokens), 42, 22)}")
        same = sum(x == y for x, y in zip(a, b))
        verdict = "agree" if a == b else "[red]DIFFER[/]"
        console.print(f"  {verdict}, {same} of {len(a)} tokens equal")


def memory_table(stock: Run, ring: Run) -> Table:
    table = Table("", "stock", "ring", title="KV of the longest prompt's request")
    block_bytes = stock.steps[0].sliding / sum(stock.steps[0].blocks)

    def held(size: float) -> str:
        return f"{size / block_bytes:.0f} blocks, {mib(size)}"

    def row(what: str, value: Callable[[Run], str]) -> None:
        table.add_row(what, value(stock), value(ring))

    row("sliding layers, peak", lambda r: held(max(s.sliding for s in r.steps)))
    row("sliding layers, end", lambda r: held(r.steps[-1].sliding))
    row("all layers, peak", lambda r: held(max(s.total for s in r.steps)))
    row("all layers, end", lambda r: held(r.steps[-1].total))
    row("vLLM's maximum concurrency", lambda r: f"{r.max_concurrency:.2f}x")
    row("vLLM's KV cache size", lambda r: f"{r.kv_tokens:,} tokens")
    return table


def draw(runs: dict[str, Run], prompt_length: int, output: Path) -> None:
    """KV of the sliding-window layers over one request's life, prefill and decode."""
    size = {name: [s.sliding / 2**20 for s in run.steps] for name, run in runs.items()}
    figure = Figure(figsize=(10, 5.4))
    prefill, decode = figure.subplots(1, 2, sharey=True, width_ratios=(1, 3))
    for name, run in runs.items():
        order = ("hybrid off", "stock", "ring").index(name)
        style = dict(color=COLOURS[name], lw=4 - order, zorder=2 + order)
        x, y = [step.num_tokens for step in run.steps], size[name]
        last = x.index(prompt_length)  # step of prefill
        prefill.step([0, *x[: last + 1]], [y[0], *y[: last + 1]], **style)
        generated = [n - prompt_length for n in x[last:]]
        decode.step(generated, y[last:], where="post", **style)
    full = ring_blocks(W, runs["ring"].block_size)
    peak, level, most = (max(size[name]) for name in ENGINES)
    bound = level * W / (full * runs["ring"].block_size)
    for axes in (prefill, decode):
        axes.axhline(bound, color="black", lw=1, ls=(0, (4, 3)), zorder=1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#eeeeee")
    end = len(size["ring"])
    prefill.set(xlim=(0, prompt_length), xlabel="prompt tokens (prefill)")
    prefill.set(xticks=[0, prompt_length], ylabel="KV held by this request (MiB)")
    decode.set(
        xlim=(-end / 99, end), ylim=(0, most * 1.1), xlabel="generated tokens (decode)"
    )
    stock = f"stock: {peak:.0f} MiB in prefill; then, every 128 tokens, gives a block\n"
    ring = f"ring: {level:.0f} MiB all along (R = {full} blocks per group); notches\n"
    for name, y, text in (
        ("hybrid off", most * 0.72, "stock, hybrid manager off: grows for ever"),
        ("stock", most * 0.43, stock + "back and takes a fresh one (notches)"),
        ("ring", level * 1.13, ring + "only until the prompt has left the window"),
        ("", bound * 0.55, f"W = {W} tokens fill {bound:.0f} MiB"),
    ):
        decode.text(end * 0.03, y, text, color=COLOURS.get(name, "black"), fontsize=11)
    title = (
        "The ring is flat from prefill to the last token: KV of Gemma 3 270M's\n"
        f"15 sliding-window layers, one request, float32, vLLM {vllm_version}"
    )
    figure.suptitle(title, x=0.02, ha="left", fontsize=13)
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description="Texts and memory, stock and ring")
    parser.add_argument("--new-tokens", type=int, default=W + 256)
    parser.add_argument("--output", type=Path, default=Path("artifacts/demo.png"))
    args = parser.parse_args()
    most = OPTIONS["max_model_len"] - LENGTHS[-1]
    if not W + 128 <= args.new_tokens <= most:  # the ring must turn past the prompt
        parser.error(f"--new-tokens {args.new_tokens}: expected {W + 128} to {most}")
    warnings.filterwarnings("ignore", category=FutureWarning)
    started, console = time.monotonic(), Console()
    with console.status("Gemma 3 270M (built on first use: about a minute)"):
        model = gemma3_270m()
        tokenizer = AutoTokenizer.from_pretrained(model)
        prompts = token_prompts(LENGTHS, tokenizer)
    with Progress("{task.description}", BarColumn(), TimeElapsedColumn()) as progress:
        new = args.new_tokens
        runs = {e: run_engine(e, model, prompts, new, progress) for e in ENGINES}
    stock, ring = runs["stock"], runs["ring"]
    print_texts(console, tokenizer, prompts, stock, ring)
    console.rule("Start-up lines of the ring")
    for line in ring.decision:
        console.print(f"ring: {line}", highlight=False, soft_wrap=True)
    console.print(memory_table(stock, ring))
    draw(runs, LENGTHS[-1], args.output)
    console.print(f"Wrote {args.output}, {time.monotonic() - started:.0f} s in all.")
    if stock.texts != ring.texts:
        console.print("[red]A text with the ring differs from stock's.")
        return 1
    if reason := not_flat(ring, LENGTHS[-1]):
        console.print(f"[red]The ring's memory is not flat: {reason}.")
        return 1
    console.print("[green]Every text agrees and the ring's memory is flat.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
