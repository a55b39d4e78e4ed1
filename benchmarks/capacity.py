# SPDX-License-Identifier: Apache-2.0
"""How many requests fit: vLLM's own figures for real model shapes, without weights.

vLLM's planner divides a fixed KV memory three ways: stock, stock with the hybrid
manager off, ring. *Maximum concurrency* and *KV cache size* are what vLLM logs at
start-up, by its own functions. The ring's is also computed here from ``docs/design.md``
section 5 alone; exit code 1 if the two differ, or if the ring is worse than stock
anywhere.
"""

if __name__ == "__main__" and not __package__:  # python benchmarks/capacity.py
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).parent.parent)

import argparse
import sys
from typing import Any

from matplotlib.figure import Figure
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

from benchmarks import common
from benchmarks.shapes import GIB, SHAPES, Shape, engine_config, layer_specs, plan

LENGTHS = tuple(2**i * 1024 for i in range(2, 8))  # 4K .. 128K tokens
MODES = ("stock", "hybrid off", "ring")

# (model, max_model_len, prefix caching) -> least ring/stock, with the default options.
BARS = {
    ("gemma3-27b", 16384, False): 4.5,
    ("gemma3-27b", 16384, True): 3.9,
    ("gpt-oss-20b", 8192, False): 1.9,
    ("gpt-oss-20b", 8192, True): 1.9,
    ("mistral-7b", 32768, False): 4.5,
    ("mistral-7b", 32768, True): 2.4,
}
BARS_FOR = {"block_size": 16, "batched_tokens": 8192}


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def ring_concurrency(
    shape: Shape,
    max_model_len: int,
    *,
    caching: bool,
    kv_bytes: int,
    block_size: int,
    batched_tokens: int,
    batches: int,
) -> float:
    """Requests of ``max_model_len`` tokens that fit, by arithmetic alone.

    Every group of layers takes blocks from one pool; a block holds ``block_size``
    tokens of as many layers as the smallest kind has (the largest, if that is less
    than half as many again). No speculation: nothing rolls back.
    """
    sliding = sum(w is not None for w in shape.windows)
    full = shape.num_layers - sliding
    least, most = sorted((full, sliding))
    group = most if most < 1.5 * least or not least else least
    longest = cdiv(max_model_len, block_size)
    ring = cdiv(shape.window - 1, block_size) + 1
    in_flight = shape.window - 1 + batches * batched_tokens
    stock = cdiv(min(in_flight, max_model_len), block_size) + 1
    held = min(2 * ring if caching else ring, longest, stock)
    per_request = cdiv(full, group) * longest + cdiv(sliding, group) * held
    block_bytes = group * 2 * shape.num_kv_heads * shape.head_size * block_size * 2
    return kv_bytes // block_bytes / per_request


def capacity(
    shape: Shape, config: VllmConfig, mode: str, kv_bytes: int
) -> tuple[int, float] | None:
    """vLLM's KV cache size in tokens and maximum concurrency; None: does not start."""
    config.scheduler_config.disable_hybrid_kv_cache_manager = mode == "hybrid off"
    planned = plan(config, layer_specs(shape, config, ring=mode == "ring"), kv_bytes)
    return planned and get_kv_cache_capacity(config, planned)


def rows_of(key: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per prefix caching and ``max_model_len``."""
    shape, kv_bytes = SHAPES[key], int(args.kv_gib * GIB)
    config = engine_config(
        shape,
        block_size=args.block_size,
        max_num_batched_tokens=args.batched_tokens,
    )
    assert config.max_in_flight_tokens == 2 * args.batched_tokens
    rows = []
    for caching in (False, True):
        for length in LENGTHS:
            if length > shape.max_model_len:
                break
            config.cache_config.enable_prefix_caching = caching
            config.model_config.max_model_len = length
            found = {m: capacity(shape, config, m, kv_bytes) for m in MODES}
            bound = ring_concurrency(
                shape,
                length,
                caching=caching,
                kv_bytes=kv_bytes,
                block_size=args.block_size,
                batched_tokens=args.batched_tokens,
                batches=config.max_concurrent_batches,
            )
            rows.append(_row(key, length, caching, found, bound, args))
    return rows


def _row(key, length, caching, found, bound, args) -> dict[str, Any]:
    """``tokens`` is vLLM's KV cache size, ``requests`` its maximum concurrency."""
    row: dict[str, Any] = {
        "model": key,
        "caching": "on" if caching else "off",
        "max_model_len": length,
    }
    for mode, value in found.items():
        if value is not None:
            row[f"{mode} tokens"], row[f"{mode} requests"] = value
    row["by arithmetic"] = bound
    stock, ring = found["stock"], found["ring"]
    if stock and ring:
        row["ring/stock"] = ring[1] / stock[1]
    bar = BARS.get((key, length, caching))
    if bar and all(vars(args)[k] == v for k, v in BARS_FOR.items()):
        verdict = "pass" if row.get("ring/stock", 0) >= bar else "MISSED"
        row["result"] = f">= {bar}: {verdict}"
    if refused := [mode for mode in MODES if found[mode] is None]:
        row["result"] = f"does not start: {', '.join(refused)}"
    return row


def wrong(row: dict[str, Any]) -> str | None:
    """What must never be, or None."""
    if "ring requests" not in row:
        return "the ring does not start, stock does" if "stock tokens" in row else None
    if row["ring requests"] != row["by arithmetic"]:
        return "vLLM's concurrency is not what the arithmetic says"
    if row.get("ring/stock", 1.0) < 1.0:
        return "the ring is worse than stock"
    return None


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Ratio of maximum concurrencies against ``max_model_len``, a line per model."""
    figure = Figure(figsize=(11, 4.8))
    axes = figure.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(row["model"] for row in rows))
    for axis, caching in zip(axes, ("off", "on")):
        for i, name in enumerate(names):
            points = [
                (row["max_model_len"] / 1024, row["ring/stock"])
                for row in rows
                if (row["model"], row["caching"]) == (name, caching)
                and "ring/stock" in row
            ]
            label = SHAPES[name].name
            size = 11 - 0.8 * i  # lines that coincide stay visible
            axis.plot(*zip(*points), marker="osDv^"[i % 5], ms=size, label=label)
        axis.axhline(1, color="#888888", lw=1)
        axis.set_xscale("log", base=2)
        ticks = [length // 1024 for length in LENGTHS]
        axis.set_xticks(ticks, [f"{tick}K" for tick in ticks])
        axis.set(title=f"prefix caching {caching}", xlabel="max_model_len (tokens)")
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="maximum concurrency, ring / stock", ylim=(0, None))
    axes[1].legend(fontsize=8)
    figure.tight_layout()
    return figure


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.parser("vLLM's capacity for real shapes, stock and ring")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--kv-gib", type=float, default=40.0, help="KV memory, GiB")
    parser.add_argument("--block-size", type=int, default=16, help="tokens")
    parser.add_argument("--batched-tokens", type=int, default=8192, help="per step")
    args = parser.parse_args(argv)
    if args.quick:
        args.models = [m for m in args.models if any(m == bar[0] for bar in BARS)]
    return args


def main(argv: list[str] | None = None) -> int:
    args = options(argv)
    rows = [row for key in args.models for row in rows_of(key, args)]
    plots = [("capacity", draw(rows))]
    common.finish(args, "capacity", rows, model="shapes", plots=plots)
    failed = 0
    for row in rows:
        about = (
            f"{row['model']}, {row['max_model_len']} tokens, caching {row['caching']}"
        )
        if row.get("result", "").startswith(">="):
            line = f"{about}: ring/stock {row['ring/stock']:.2f}, bar {row['result']}"
            print(line, file=sys.stderr)
        if reason := wrong(row):
            print(f"WRONG {about}: {reason}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
