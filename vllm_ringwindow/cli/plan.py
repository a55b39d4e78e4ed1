# SPDX-License-Identifier: Apache-2.0
"""``vllm-ringwindow plan``: what fits, from a model's config alone."""

import argparse
from typing import TYPE_CHECKING, Any

from vllm_ringwindow.cli import UserError
from vllm_ringwindow.cli.common import (
    add_json,
    byte_size,
    console,
    engine_args,
    first_line,
    model_directory,
    write_json,
)

if TYPE_CHECKING:
    from vllm_ringwindow.planning import Plan

COLOURS = {"stock": "#d95f02", "hybrid off": "#888888", "ring": "#1b6ca8"}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="what fits, from a model's config alone",
        description="What a model's KV cache needs with rings, in stock vLLM and with "
        "the hybrid manager off, by vLLM's own planner. No weights are read. Takes "
        "vLLM's engine options too: --max-model-len, --block-size, ...",
    )
    parser.add_argument("model", help="a model directory, its config.json, or a name")
    parser.add_argument(
        "--kv-memory",
        type=byte_size,
        metavar="SIZE",
        help="KV cache memory per worker, 24GiB for example: how many requests fit",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw it, as PNG or SVG")
    add_json(parser)
    parser.set_defaults(run=run, takes_engine_options=True)


def run(args: argparse.Namespace, engine_options: list[str]) -> int:
    with model_directory(args.model) as model:
        engine = engine_args("plan", model, engine_options)
        from vllm_ringwindow.planning import plan

        kv_bytes = args.kv_memory or engine.kv_cache_memory_bytes
        out = console(args.json)
        try:
            with out.status("asking vLLM's planner"):
                found = plan(engine, kv_bytes)
        except (ValueError, OSError, NotImplementedError) as error:
            raise UserError(first_line(error)) from error
    result = found.as_dict() | {"model": args.model}
    if args.json:
        write_json(args.json, result)
    if args.plot:
        _save_plot(found, args.plot)
    if args.json != "-":
        show(found, args.model, out)
    return 0


def size(num_bytes: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"


def show(found: "Plan", model: str, out: Any) -> None:
    """Tables: layers, groups, memory by request length, what fits, advice."""
    from rich.table import Table

    out.print(
        f"[bold]{model}[/bold]: max_model_len {found.max_model_len}, "
        f"{found.batched_tokens} batched tokens, {found.batches_in_flight} "
        f"batch{'es' if found.batches_in_flight > 1 else ''} in flight, prefix caching "
        f"{'on' if found.prefix_caching else 'off'}"
    )
    layers = Table("layers", "kind", "window", "KV heads", "head size", "dtype")
    for kind in found.layers:
        layers.add_row(
            str(kind["layers"]),
            kind["kind"],
            str(kind["window"] or ""),
            str(kind["kv_heads"] or ""),
            str(kind["head_size"] or ""),
            kind["dtype"].removeprefix("torch."),
        )
    out.print(layers)
    groups = Table("group", "layers", "block size", "window", "R, blocks per request")
    for group in found.groups:
        groups.add_row(
            str(group["group"]),
            str(group["layers"]),
            str(group["block_size"]),
            str(group["window"] or ""),
            str(group["ring_blocks"] or "grows"),
        )
    out.print(groups)
    for line in found.decision:
        out.print(line)
    modes = list(found.fits)
    requests = Table("KV reserved for a request of", *modes, "stock / ring")
    for row in found.per_request:
        requests.add_row(
            f"{row['tokens']} tokens",
            *(size(row[mode]) for mode in modes),
            f"{row['stock'] / row['ring']:.2f}",
        )
    out.print(requests)
    fits = Table("", *modes)
    fits.add_row("least KV memory", *(size(f.least_bytes) for f in found.fits.values()))
    if found.kv_bytes:
        about = f"with {size(found.kv_bytes)}"
        fits.add_row(
            f"{about}: KV cache size, tokens",
            *(
                "does not start" if f.tokens is None else f"{f.tokens:,}"
                for f in found.fits.values()
            ),
        )
        fits.add_row(
            "maximum concurrency",
            *(
                "" if f.concurrency is None else f"{f.concurrency:.2f}x"
                for f in found.fits.values()
            ),
        )
    out.print(fits)
    out.print(f"[bold]{found.advice}[/bold]")


def _save_plot(found: "Plan", path: str) -> None:
    try:
        draw(found).savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: {first_line(error)}") from None


def draw(found: "Plan") -> Any:
    """KV reserved against a request's length, and the least memory that starts."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("plots need matplotlib: pip install matplotlib") from None

    figure = Figure(figsize=(10, 4))
    left, right = figure.subplots(1, 2)
    lengths = [row["tokens"] for row in found.per_request]
    for mode, colour in COLOURS.items():
        reserved = [row[mode] / 2**20 for row in found.per_request]
        left.plot(lengths, reserved, marker="o", color=colour, label=mode)
    left.set(xlabel="request length (tokens)", ylabel="KV reserved (MiB)")
    left.set_ylim(bottom=0)
    left.legend(frameon=False)
    fits = found.fits
    concurrency = {m: f.concurrency or 0 for m, f in fits.items()}
    if found.kv_bytes:
        right.bar(concurrency.keys(), concurrency.values(), color=COLOURS.values())
        right.set(ylabel="maximum concurrency", title=f"in {size(found.kv_bytes)}")
    else:
        least = {m: f.least_bytes / 2**20 for m, f in fits.items()}
        right.bar(least.keys(), least.values(), color=COLOURS.values())
        right.set(ylabel="least KV memory (MiB)")
    figure.tight_layout()
    return figure
