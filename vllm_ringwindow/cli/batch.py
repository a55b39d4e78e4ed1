# SPDX-License-Identifier: Apache-2.0
"""``vllm-ringwindow batch``: a file of prompts through vLLM engines, by Ray Data."""

import argparse
import json
import os
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ringwindow.cli import UserError
from vllm_ringwindow.cli.common import (
    changed_options,
    console,
    model_directory,
    positive,
)

if TYPE_CHECKING:
    from vllm_ringwindow.batch.job import Progress

SOME_ROWS_FAILED = 3


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "batch",
        help="a file of prompts through vLLM engines, by Ray Data",
        description="INPUT: .jsonl or .parquet, a file or a folder, rows of OpenAI's "
        "batch format or with a 'prompt' or 'messages' column. OUTPUT: a folder. "
        "Killed and run again it goes on where it was. Takes vLLM's engine options "
        "too. Exit codes: 0 all rows answered, 3 some rows have an error, 1 the job "
        "failed, 2 wrong use.",
    )
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", required=True, help="a directory or a name")
    parser.add_argument(
        "--replicas", type=positive, default=1, help="engines (default 1)"
    )
    parser.add_argument(
        "--ray-address", metavar="ADDRESS", help="a cluster (default: this machine)"
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=32,
        help="rows handed to an engine at a time; it works on eight such batches at "
        "once (default 32)",
    )
    parser.add_argument(
        "--sampling",
        default='{"temperature": 0, "max_tokens": 256}',
        metavar="JSON",
        help="sampling parameters where a row gives none (default: %(default)s)",
    )
    parser.add_argument("--chat-template", type=Path, metavar="FILE")
    parser.add_argument(
        "--keep-order", action="store_true", help="results in the input's order"
    )
    parser.set_defaults(run=run, takes_engine_options=True)


def run(args: argparse.Namespace, engine_options: list[str]) -> int:
    import ray  # noqa: F401  if it is missing, before anything is written
    from rich.text import Text
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from vllm_ringwindow.batch.job import Job, run_job
    from vllm_ringwindow.batch.rows import JobError, JobFailed, sampling

    try:
        defaults = json.loads(args.sampling)
        if not isinstance(defaults, dict):
            raise ValueError("expected an object")
        defaults = sampling(defaults)
        # The default of max_tokens is not what a min_tokens is measured by.
        SamplingParams(**({"max_tokens": None} | defaults))
    except (ValueError, VLLMValidationError) as error:
        raise UserError(f"--sampling: {error}") from None
    template = None
    if args.chat_template:
        try:
            template = args.chat_template.read_text()
        except OSError as error:
            raise UserError(
                f"--chat-template {args.chat_template}: {error.strerror}"
            ) from None
        except ValueError:
            raise UserError(f"--chat-template {args.chat_template}: not text") from None
    with model_directory(args.model) as model:
        engine = changed_options("batch", model, engine_options)
        if Path(model).is_dir():  # Ray's workers may be in another folder
            engine.setdefault("served_model_name", model)
            engine["model"] = str(Path(model).absolute())
        engine.setdefault("attention_backend", "RING")
        job = Job(
            input=args.input,
            output=args.output,
            engine=engine,
            sampling=defaults,
            replicas=args.replicas,
            batch_size=args.batch_size,
            ray_address=args.ray_address,
            chat_template=template,
            keep_order=args.keep_order,
        )
        out = console("-")  # stderr: stdout is for whoever pipes
        shown = _Shown(out)
        try:
            # Ray prints what fails in its processes, traceback and all.
            with shown, open(os.devnull, "w") as ray, redirect_stdout(ray):
                results = run_job(job, shown.update)
        except JobFailed as error:
            out.print(Text(f"vllm-ringwindow batch: {error}"), soft_wrap=True)
            return 1
        except JobError as error:
            raise UserError(str(error)) from error
    for row, reason in sorted(results.errors.items())[:10]:
        out.print(Text.assemble((f"row {row}", "yellow"), f": {reason}"))
    if len(results.errors) > 10:
        out.print(f"... and {len(results.errors) - 10} more rows with an error")
    out.print(
        Text(f"{results.final}: {len(results.done)} rows, {len(results.errors)} errors")
    )
    return SOME_ROWS_FAILED if results.errors else 0


class _Shown:
    """A progress bar with rates and the time that is left."""

    def __init__(self, out: Any) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}"),
            TimeRemainingColumn(),
            console=out,
        )
        self._task = self._bar.add_task("starting engines", total=None, rates="")
        self._started: float | None = None
        self._told = 0

    def __enter__(self) -> "_Shown":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, progress: "Progress") -> None:
        for line in progress.engines[self._told :]:
            self._bar.console.print(line, markup=False)
            self._told += 1
        now = time.monotonic()
        self._started = self._started or now
        seconds = max(now - self._started, 1e-9)
        new = progress.done - progress.resumed
        rates = (
            f"{new / seconds:.1f} rows/s, {progress.output_tokens / seconds:.0f} tok/s"
            if new
            else ""
        )
        if progress.errors:
            rates += f", {progress.errors} errors"
        self._bar.update(
            self._task,
            description="rows" if new or progress.done == progress.total else None,
            total=progress.total,
            completed=progress.done,
            rates=rates,
        )
