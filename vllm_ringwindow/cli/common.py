# SPDX-License-Identifier: Apache-2.0
"""What the subcommands share: engine options, byte sizes, output."""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ringwindow.cli import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from vllm.engine.arg_utils import EngineArgs

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def byte_size(text: str) -> int:
    """``24GiB``, ``24G``, ``512MiB`` or bytes; for argparse."""
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in UNITS else ""
    try:
        value = int(float(number.removesuffix(unit)) * UNITS[unit])
    except (ValueError, OverflowError):
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; examples: 24GiB, 512MiB, 1073741824"
        )
    return value


def positive(text: str) -> int:
    """A number of at least 1; for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return value


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const="-",
        help="write the result as JSON; '-', or no FILE, is stdout",
    )


def write_json(target: str, result: Any) -> None:
    """To a file, or as the only thing on stdout."""
    text = json.dumps(result, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        write_text(target, text)


def write_text(path: str | Path, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def console(json_target: str | None) -> "Console":
    """Where tables go: stdout, unless JSON goes there."""
    from rich.console import Console

    return Console(stderr=json_target == "-", highlight=False)


@contextmanager
def model_directory(model: str) -> Iterator[str]:
    """A directory that vLLM reads: ``model`` itself, or one around a config.json."""
    path = Path(model)
    if path.is_dir():
        config = path / "config.json"
        if not config.is_file() and not list(path.glob("*.gguf")):
            raise UserError(f"{model} is not a model directory: it has no config.json")
        if config.is_file():
            _check_config(config)
        yield model
    elif path.is_file() and path.suffix == ".json":
        _check_config(path)
        with tempfile.TemporaryDirectory() as folder:
            shutil.copyfile(path, Path(folder) / "config.json")
            yield folder
    elif path.exists():
        raise UserError(f"{model} is neither a model directory nor a config.json")
    elif model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UserError(f"{model} does not exist")
    else:
        yield model  # a name that vLLM resolves


def _check_config(path: Path) -> None:
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict) or not config.get("architectures"):
        raise UserError(f"{path} does not say 'architectures': not a model's config")


def engine_args(command: str, model: str, options: Sequence[str]) -> "EngineArgs":
    """vLLM's own parser on the options that are not ours."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()
    parser = FlexibleArgumentParser(
        prog=f"vllm-ringwindow {command}",
        add_help=False,
        usage=argparse.SUPPRESS,  # 250 lines before the one that tells
    )
    EngineArgs.add_cli_args(parser)
    namespace = parser.parse_args([*options, "--model", model])
    return EngineArgs.from_cli_args(namespace)


def changed_options(command: str, model: str, given: Sequence[str]) -> dict[str, Any]:
    """What of vLLM's options is not its default, as ``LLM`` takes it, and as JSON can.

    Raises:
        UserError: vLLM refuses an option, or cannot find what it names, or it cannot
            be handed to another process.
    """
    from vllm.engine.arg_utils import EngineArgs

    try:
        chosen = vars(engine_args(command, model, given))
        default = vars(EngineArgs(model=model))
    except (OSError, ValueError) as error:
        raise UserError(first_line(error)) from error
    options = {
        name: value
        for name, value in chosen.items()
        if name != "model" and value != default[name]
    }
    for name, value in options.items():
        try:
            json.dumps(value)
        except TypeError:
            raise UserError(
                f"--{name.replace('_', '-')}: this option cannot be handed to another "
                "process; leave it out"
            ) from None
    return options | {"model": model}


def first_line(error: BaseException) -> str:
    """What a user needs of an exception's text."""
    errors = getattr(error, "errors", None)
    if callable(errors):  # pydantic's: several lines, the option on the second
        first = errors()[0]
        where = ".".join(map(str, first["loc"]))
        text = first["msg"].removeprefix("Value error, ").splitlines()[0]
        return f"{where}={first['input']!r}: {text}" if where else text
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
