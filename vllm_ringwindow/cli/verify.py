# SPDX-License-Identifier: Apache-2.0
"""``vllm-ringwindow verify``: the go-live checklist on the user's model and machine."""

import argparse
import base64
import html
import io
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ringwindow.cli import UserError
from vllm_ringwindow.cli.common import (
    add_json,
    changed_options,
    console,
    model_directory,
    write_json,
    write_text,
)

if TYPE_CHECKING:
    from vllm_ringwindow.verification import Verification


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="does the ring answer as stock does? the go-live checklist",
        description="Starts stock vLLM, the ring, and stock again, in turn, on your "
        "model and compares their answers. Takes vLLM's engine options too; on a CPU "
        "--dtype is float32 unless you say otherwise. Exit code 1 if any check fails.",
    )
    parser.add_argument("model", help="a model directory, or a name that vLLM resolves")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="text to take prompts from (default: built in)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="LOGPROB",
        help="largest difference of a log-probability (default 0.001 in float32, else "
        "three times what stock differs from itself in other chunks)",
    )
    parser.add_argument("--html", metavar="FILE", help="write a report with plots")
    parser.add_argument(
        "--break",
        dest="fault",
        choices=("window", "ring", "copy-out"),
        help="damage the ring on purpose, to see that this check can fail",
    )
    add_json(parser)
    parser.set_defaults(run=run, takes_engine_options=True)


def run(args: argparse.Namespace, engine_options: list[str]) -> int:
    if args.prompts and not Path(args.prompts).is_file():
        raise UserError(f"--prompts {args.prompts}: no such file")
    if args.tolerance is not None and not args.tolerance > 0:
        raise UserError(f"--tolerance {args.tolerance}: must be above 0")
    if args.html:
        _matplotlib()
    out = console(args.json)
    with model_directory(args.model) as model:
        options = _exact_on_cpu(changed_options("verify", model, engine_options))
        options.pop("attention_backend", None)  # both are compared
        found = _verify(args, options, out)
    result = asdict(found) | {"model": args.model, "passed": found.passed}
    if args.json:
        write_json(args.json, result)
    if args.html:
        write_text(args.html, report(found))
    if args.json != "-":
        show(found, out)
    return 0 if found.passed else 1


def _exact_on_cpu(options: dict[str, Any]) -> dict[str, Any]:
    """float32 unless a type was given: GPU attention kernels mostly have none."""
    from vllm.platforms import current_platform

    return ({"dtype": "float32"} if current_platform.is_cpu() else {}) | options


def _verify(args: argparse.Namespace, options: dict, out: Any) -> "Verification":
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from vllm_ringwindow.verification import EngineFailed, ask, compare

    job = {"text": args.prompts, "fault": None, "brief": False}
    ring_options = options | {"attention_backend": "RING"}
    jobs = {
        "stock": job | {"engine": options},
        "ring": job | {"engine": ring_options, "fault": args.fault},
        "stock again": job | {"engine": options, "brief": True},
    }
    answers = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=out, transient=True) as progress:
        bar = progress.add_task("", total=27)
        for name, what in jobs.items():

            def say(text: str, name: str = name) -> None:
                progress.update(bar, advance=1, description=f"{name}: {text}")

            try:
                answers[name] = ask(what, say)
            except EngineFailed as error:
                raise UserError(f"the {name} engine failed: {error}") from None
    return compare(
        args.model,
        answers["stock"],
        answers["ring"],
        answers["stock again"],
        args.tolerance,
    )


def show(found: "Verification", out: Any) -> None:
    from rich.table import Table

    for line in found.decision:
        out.print(line)
    table = Table("", "check", "found", "allowed")
    for check in found.checks:
        mark = "[green]pass[/green]" if check.passed else "[red]FAIL[/red]"
        table.add_row(mark, check.name, check.found, check.allowed)
    out.print(table)
    for check in found.checks:
        if not check.passed:
            out.print(f"[red]{check.name}[/red]: {check.hint}")
    failed = sum(not check.passed for check in found.checks)
    out.print(
        f"[bold]{failed} of {len(found.checks)} checks failed[/bold]"
        if failed
        else f"[bold]all {len(found.checks)} checks passed[/bold]: {found.dtype}, "
        f"W = {found.window}, differences of log-probabilities at most "
        f"{found.tolerance:.2g}"
    )


# -- the HTML report -------------------------------------------------------------------


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--html needs matplotlib: pip install matplotlib") from None
    return Figure


def draw(found: "Verification") -> dict[str, Any]:
    """Figures by title: differences by position, memory by step, checks."""
    Figure = _matplotlib()
    small = 1e-9
    by_position = Figure(figsize=(10, 3.5))
    axes = by_position.subplots()
    axes.plot([max(d, small) for d in found.differences], lw=0.8, color="#1b6ca8")
    axes.axhline(found.tolerance, color="#d95f02", label="allowed")
    axes.axvline(found.window, color="black", ls="--", lw=1, label="W")
    wrap = found.ring_blocks * found.block_size
    if wrap:
        axes.axvline(wrap, color="#888888", ls=":", label="the ring is full")
    axes.set(yscale="log", xlabel="position (tokens)", ylabel="|stock - ring|")
    axes.legend(frameon=False)
    memory = Figure(figsize=(10, 3))
    axes = memory.subplots()
    for (name, blocks), colour in zip(found.memory.items(), ("#d95f02", "#1b6ca8")):
        axes.step(range(len(blocks)), blocks, where="post", label=name, color=colour)
    axes.axhline(found.ring_blocks, color="black", ls="--", lw=1, label="R")
    axes.set(xlabel="step", ylabel="blocks held")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figures = {
        "Log-probabilities of the long prompt, by position": by_position,
        "Blocks of one sliding-window group while a request grows": memory,
    }
    for figure in figures.values():
        figure.tight_layout()
    return figures


def report(found: "Verification") -> str:
    """A page that needs nothing else: tables, hints, plots inside."""
    rows = "\n".join(
        f'<tr class="{"pass" if c.passed else "fail"}">'
        f"<td>{'pass' if c.passed else 'FAIL'}</td>"
        + "".join(f"<td>{html.escape(x)}</td>" for x in (c.name, c.found, c.allowed))
        + f"<td>{'' if c.passed else html.escape(c.hint)}</td></tr>"
        for c in found.checks
    )
    plots = "\n".join(
        f'<h2>{html.escape(title)}</h2><img alt="{html.escape(title)}" '
        f'src="data:image/png;base64,{_png(figure)}">'
        for title, figure in draw(found).items()
    )
    verdict = "All checks passed" if found.passed else "Checks failed"
    decision = "<br>".join(html.escape(line) for line in found.decision)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{verdict}: {html.escape(found.model)}
</title><style>
body {{ font: 15px/1.45 sans-serif; margin: 2em auto; max-width: 70em; color: #222 }}
td, th {{ padding: .25em .8em; border-bottom: 1px solid #ddd; text-align: left }}
.pass td:first-child {{ color: #1a7f37 }}
.fail td:first-child {{ color: #c5221f; font-weight: bold }}
img {{ max-width: 100% }}
</style></head><body>
<h1>{verdict}</h1>
<p>{html.escape(found.model)}, {found.dtype}, W = {found.window} tokens, block size
{found.block_size}, R = {found.ring_blocks} blocks. Stock vLLM against the ring; the
numbers are differences of log-probabilities.</p>
<p>{decision}</p>
<table><tr><th></th><th>check</th><th>found</th><th>allowed</th><th>look at</th></tr>
{rows}
</table>
{plots}
</body></html>
"""


def _png(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode()
