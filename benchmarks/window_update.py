# SPDX-License-Identifier: Apache-2.0
"""What it costs to slide a window of K/V by one token, three ways, as plain tensors.

``shift``: an array of W tokens; the W - 1 that stay are copied to their new places.
``ring``: W slots, one written. ``paged``: one slot written, and every 128 tokens a
block taken from a free list and one given back, as stock vLLM does (here with the
cheapest list there is). ``ring`` and ``paged`` write by the same indexed assignment.

Measured: microseconds (median, mean, least, greatest) for a step of all sequences, one
token each, float32 on the CPU; the sequences are of one length, so that their blocks
fill in the same step and only ``paged``'s mean has the pool's part. Counted: K/V bytes
moved (written to their place) in a step, blocks taken from and given back to the pool
per step (mean), K/V bytes held. On the way the window is read back, oldest to newest,
and must be bit-identical for all three.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import os
import statistics
import time
from collections import deque
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from benchmarks.common import finish, parser, spread
from vllm_ringwindow.geometry import cdiv, slot, window_base

BLOCK_SIZE = 128  # tokens, vLLM's default on a CPU
NUM_TOKENS = 61  # different tokens' K/V; prime, so that none looks like a neighbour


class Shift:
    """The naive array; two of them, so that the copy may run in parallel."""

    def __init__(self, window: int, batch: int, entry: torch.Size) -> None:
        self.kv = torch.zeros(batch, window, *entry)
        self.other = torch.zeros_like(self.kv)
        self.pool_calls = 0

    def push(self, position: int, token: Tensor) -> int:
        """Returns bytes moved, as in the other classes. ``token``: [B, 2, H, D]."""
        self.other[:, :-1].copy_(self.kv[:, 1:])
        self.other[:, -1] = token
        self.kv, self.other = self.other, self.kv
        return self.kv.nbytes

    def read(self, position: int, sequence: int) -> Tensor:
        """[W, 2, H, D], the window of the query at ``position``."""
        return self.kv[sequence]


class Ring:
    """Slot = position mod W."""

    def __init__(self, window: int, batch: int, entry: torch.Size) -> None:
        self.window = window
        self.kv = torch.zeros(batch, window, *entry)
        self.rows = torch.arange(batch)
        self.pool_calls = 0

    def push(self, position: int, token: Tensor) -> int:
        self.kv[self.rows, slot(position, self.window)] = token
        return token.nbytes

    def read(self, position: int, sequence: int) -> Tensor:
        first = slot(position + 1, self.window)
        return torch.cat([self.kv[sequence, first:], self.kv[sequence, :first]])


class Paged:
    """Stock's way: blocks come and go, a table says where each is."""

    def __init__(self, window: int, batch: int, entry: torch.Size) -> None:
        self.window = window
        per_sequence = cdiv(window - 1, BLOCK_SIZE) + 2
        self.kv = torch.zeros(batch * per_sequence, BLOCK_SIZE, *entry)
        self.free = deque(range(len(self.kv)))
        self.tables: list[deque[int]] = [deque() for _ in range(batch)]
        self.base = 0  # logical block of the tables' first
        self.last = torch.zeros(batch, dtype=torch.long)  # block being filled
        self.pool_calls = 0

    def push(self, position: int, token: Tensor) -> int:
        offset = position % BLOCK_SIZE
        if offset == 0:
            self._next_block(position)
        self.kv[self.last, offset] = token
        return token.nbytes

    def _next_block(self, position: int) -> None:
        base = window_base(position, self.window, BLOCK_SIZE)
        for table in self.tables:
            for _ in range(base - self.base):
                self.free.append(table.popleft())
                self.pool_calls += 1
            table.append(self.free.popleft())
            self.pool_calls += 1
        self.base = base
        self.last = torch.tensor([table[-1] for table in self.tables])

    def read(self, position: int, sequence: int) -> Tensor:
        blocks = self.kv[list(self.tables[sequence])].flatten(0, 1)
        stop = position + 1 - self.base * BLOCK_SIZE
        return blocks[stop - self.window : stop]


METHODS = {"shift": Shift, "ring": Ring, "paged": Paged}
COLOURS = {"shift": "#888888", "ring": "#1b6ca8", "paged": "#d95f02"}


def fill(store: Any, tokens: Tensor, count: int) -> None:
    """Positions 0 .. count - 1; the shifted array is filled as it would end up."""
    if isinstance(store, Shift):
        window = store.kv.shape[1]
        for i, position in enumerate(range(count - window, count)):
            store.kv[:, i] = tokens[position % NUM_TOKENS]
        return
    for position in range(count):
        store.push(position, tokens[position % NUM_TOKENS])


def check(store: Any, tokens: Tensor, position: int, window: int) -> None:
    """The window of every sequence, bit for bit; one expectation for all methods."""
    positions = torch.arange(position - window + 1, position + 1) % NUM_TOKENS
    for sequence in range(tokens.shape[1]):
        found = store.read(position, sequence)
        if not torch.equal(found, tokens[positions, sequence]):
            raise AssertionError(f"{type(store).__name__}: sequence {sequence} differs")


def measure(method: str, window: int, batch: int, heads: int, steps: int) -> dict:
    """One row. Steps are timed one by one; the window is checked before and after."""
    generator = torch.Generator().manual_seed(window + batch)
    tokens = torch.randn(NUM_TOKENS, batch, 2, heads, 128, generator=generator)
    store = METHODS[method](window, batch, tokens.shape[2:])
    first = 2 * window + 1
    fill(store, tokens, first)
    check(store, tokens, first - 1, window)
    store.pool_calls = moved = 0
    times = []
    for position in range(first, first + steps):
        token = tokens[position % NUM_TOKENS]
        started = time.perf_counter()
        moved += store.push(position, token)
        times.append((time.perf_counter() - started) * 1e6)
    check(store, tokens, first + steps - 1, window)
    time_us = spread(times)
    return dict(
        window=window,
        batch=batch,
        method=method,
        median_us=time_us["median"],
        mean_us=statistics.mean(times),
        min_us=time_us["min"],
        max_us=time_us["max"],
        bytes_moved=moved // steps,
        pool_calls=store.pool_calls / steps,
        bytes_held=store.kv.nbytes * (2 if method == "shift" else 1),
        steps=steps,
    )


def num_steps(method: str, window: int, quick: bool) -> int:
    """Whole blocks, so that ``paged`` takes as many as it does in the long run."""
    if method == "shift":
        return 8 if quick else 16  # every step copies the same bytes
    return (2 if quick else 8) * BLOCK_SIZE


def draw(rows: list[dict]) -> Any:
    """Bytes written and microseconds, against W, for the largest batch."""
    from matplotlib.figure import Figure

    batch = max(row["batch"] for row in rows)
    figure = Figure(figsize=(9, 4))
    for axes, key, label in zip(
        figure.subplots(1, 2),
        ("bytes_moved", "median_us"),
        ("K/V bytes moved per step", "microseconds per step (median)"),
    ):
        for method in METHODS:
            points = [
                (row["window"], row[key])
                for row in rows
                if row["method"] == method and row["batch"] == batch
            ]
            style = dict(marker="o", color=COLOURS[method], label=method)
            axes.plot(*zip(*points), ls="--" if method == "paged" else "-", **style)
        axes.set(xscale="log", yscale="log", xlabel="W (tokens)", title=label)
        windows = sorted({row["window"] for row in rows})
        axes.set_xticks(windows, windows, minor=False)
        axes.set_xticks([], minor=True)
        axes.grid(color="#eeeeee")
    axes.legend(frameon=False)
    figure.suptitle(f"Sliding a window by one token, {batch} sequences, float32 on CPU")
    figure.tight_layout()
    return figure


def main() -> int:
    options = parser("Sliding a window by one token: shift, ring, paged")
    args = options.parse_args()
    heads = 2 if args.quick else 8
    windows = (512, 2048, 8192) if args.quick else (512, 1024, 2048, 4096, 8192)
    batches = (1, 8) if args.quick else (1, 8, 64)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    shapes = [(window, batch) for window in windows for batch in batches]
    rows: list[dict] = []
    for window, batch in track(shapes, "shapes", console=Console(stderr=True)):
        needed = 2 * window * batch * 2 * heads * 128 * 4
        if needed > available * 0.7:
            print(
                f"left out, {needed / 2**30:.1f} GiB: {window=} {batch=}",
                file=sys.stderr,
            )
            continue
        for method in METHODS:
            steps = num_steps(method, window, args.quick)
            rows.append(measure(method, window, batch, heads, steps))
    for row in rows:
        row |= dict(kv_heads=heads, head_size=128)
    plots = [("window_update", draw(rows))] if args.save else []
    finish(args, "window_update", rows, model="op-level", plots=plots)
    print("the window read back is identical for all three", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
