# SPDX-License-Identifier: Apache-2.0
"""``vllm-ringwindow``: before, during and after switching the ring on.

Exit codes: 0 yes, 1 no (a check failed, a fault was found), 2 wrong use. Tables go to
stdout; ``--json FILE`` writes the same as JSON, ``-`` is stdout and then the only thing
on it. Messages and progress go to stderr.
"""

import argparse
import os
import sys
from collections.abc import Sequence

_VLLM = "'vllm-ringwindow[cpu]' or 'vllm-ringwindow[cuda]'"
# What is not a requirement of the package -> what brings it.
_EXTRAS = {
    "vllm": _VLLM,
    "torch": _VLLM,
    "pyarrow": "'vllm-ringwindow[batch]'",
    "ray": "'vllm-ringwindow[batch]'",
    "pydantic": "'vllm-ringwindow[batch]'",
}


class UserError(Exception):
    """One line for the user; exit code 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """The console script."""
    # Read by vLLM at import. Its log is about an engine that is not being started.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    args, engine_options = parser().parse_known_args(argv)
    if engine_options and not args.takes_engine_options:
        parser().error(f"unrecognized arguments: {' '.join(engine_options)}")
    try:
        return args.run(args, engine_options)
    except UserError as error:
        print(f"vllm-ringwindow {args.command}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        extras = _EXTRAS.get((error.name or "").partition(".")[0])
        if extras is None:
            raise
        print(
            f"vllm-ringwindow {args.command}: needs {error.name}, which is not "
            f"installed here: pip install {extras}",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """The whole command line; subcommands import what they need when they run."""
    from vllm_ringwindow import __version__

    result = argparse.ArgumentParser(
        prog="vllm-ringwindow", description="Sliding-window layers on rings, for vLLM."
    )
    result.add_argument("--version", action="version", version=__version__)
    commands = result.add_subparsers(dest="command", required=True)
    for module in _COMMANDS:
        __import__(f"{__name__}.{module}")
        sys.modules[f"{__name__}.{module}"].add_parser(commands)
    return result


_COMMANDS = ("plan", "verify", "inspect", "doctor", "batch")
