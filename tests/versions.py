# SPDX-License-Identifier: Apache-2.0
"""``make compat``: the plugin on each vLLM release that it might meet.

PyPI has no CPU build of every release. The CUDA wheel of another one goes, without its
dependencies, into an environment that finds the rest in this one (``.venv-0.33``): its
Python runs here, scheduler, managers, planner and builders; its kernels do not.

Prints a table, and puts it into ``docs/versions.md`` with ``--save``. Exit code 1 if a
release that is supported fails a check, or one that is not passes all.
"""

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import sysconfig
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- make compat: begin -->\n", "<!-- make compat: end -->\n"
# Its CPU build is the one that `make venv` installs.
HERE = "0.32"
SUPPORTED = {"0.31": False, "0.32": True, "0.33": True}

IMPORTS, PATCHES, OVERRIDES = "modules import", "patches fit", "overrides fit"
TESTS = {
    "geometry": ["test_geometry", "test_reference"],
    "scheduler": ["test_simulated_scheduler", "test_coordinator", "test_fuzz"],
    "patches": ["test_compat"],
    "plugin": ["test_plugin"],
}
MODULES = (
    "policy",
    "compat",
    "core.spec",
    "core.manager",
    "core.coordinator",
    "attention.builder",
    "attention.impl",
    "attention.cpu",
    "attention.flash",
    "attention.triton",
    "planning",
    "report",
    "metrics",
    "state",
)


def environment(release: str) -> Path:
    """The Python of ``release``; its environment is made if there is none."""
    if release == HERE:
        return Path(sys.executable)
    venv = ROOT / f".venv-{release}"
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", venv], check=True
        )
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q"]
    subprocess.run([*pip, "--no-deps", f"vllm=={release}.*"], check=True)
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.check_output([python, "-c", query], text=True).strip()
    # Its own packages come first, so its vLLM hides this one's.
    (Path(packages) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(python: Path, *args: str) -> subprocess.CompletedProcess:
    # Not found by its distribution's name, as the CPU build is.
    env = os.environ | {"VLLM_TARGET_DEVICE": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [python, *args], cwd=ROOT, env=env, capture_output=True, text=True
    )


def run_tests(python: Path, names: list[str]) -> tuple[bool, str]:
    """Whether they pass, and pytest's own count."""
    files = [f"tests/{name}.py" for name in names]
    options = ["-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
    options += ["-m", "not engine and not slow and not long", "-p", "no:cacheprovider"]
    done = run(python, *options, *files)
    lines = done.stdout.strip().splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(f"    {line}", file=sys.stderr)
    counts = [line for line in lines if re.match(r"\d+ \w+.* in [\d.]+s", line)]
    return done.returncode == 0, counts[-1].split(" in ")[0] if counts else "no tests"


# -- what is looked at in the release's own process ------------------------------------


def look() -> dict[str, list[str]]:
    """Check -> what is wrong."""
    import vllm
    import vllm.v1.engine.core  # noqa: F401  two patches are of it, once it is loaded

    import vllm_ringwindow

    vllm_ringwindow.vllm_version = lambda: vllm.__version__  # supported or not
    wrong: dict[str, list[str]] = {IMPORTS: [], PATCHES: [], OVERRIDES: []}
    for name in MODULES:
        try:
            module = import_module(f"vllm_ringwindow.{name}")
        except Exception as error:
            wrong[IMPORTS].append(f"{name}: {_first_line(error)}")
        else:
            wrong[OVERRIDES] += unfit_overrides(module)
    try:
        compat = import_module("vllm_ringwindow.compat")
    except Exception as error:
        wrong[PATCHES].append(_first_line(error))
        return wrong
    for patch in compat.PATCHES:
        try:
            patch.apply()
        except compat.MissingTarget as error:
            wrong[PATCHES].append(_first_line(error))
    try:
        compat.register_extensions()
    except Exception as error:
        wrong[PATCHES].append(f"extension points: {_first_line(error)}")
    if compat.policy.BACKEND_NAME not in compat.AttentionBackendEnum.__members__:
        wrong[PATCHES].append(
            "register_backend() takes no new name: --attention-backend ring is unknown"
        )
    return wrong


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def unfit_overrides(module) -> list[str]:
    """Methods that cannot be called as the methods of vLLM that they override."""
    wrong = []
    for cls in vars(module).values():
        if not inspect.isclass(cls) or cls.__module__ != module.__name__:
            continue
        for name, ours in vars(cls).items():
            function = getattr(ours, "__func__", ours)
            theirs = next(
                (vars(c)[name] for c in cls.__mro__[1:] if _is_vllms(c, name)), None
            )
            theirs = getattr(theirs, "__func__", theirs)
            if inspect.isfunction(function) and inspect.isfunction(theirs):
                if name != "__init__" and (what := _unfit(function, theirs)):
                    wrong.append(f"{cls.__name__}.{name}: {what}")
    return wrong


def _is_vllms(cls: type, name: str) -> bool:
    return cls.__module__.startswith("vllm.") and name in vars(cls)


def _unfit(ours, theirs) -> str | None:
    """What of a call to ``theirs`` would ``ours`` not take."""
    mine = inspect.signature(ours).parameters.values()
    kinds = {p.kind for p in mine}
    names = {p.name for p in mine}
    parameters = inspect.signature(theirs).parameters.values()
    for p in parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or p.name in names:
            continue
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            return f"no parameter {p.name!r}"
    for p in mine:
        required = p.default is p.empty and p.kind not in (
            p.VAR_POSITIONAL,
            p.VAR_KEYWORD,
        )
        if required and p.name not in {q.name for q in parameters}:
            return f"vLLM gives no {p.name!r} any more"
    return None


# -- the table -------------------------------------------------------------------------


def check(release: str) -> list[tuple[str, bool, str]]:
    """(check, passed, what was found) of one release."""
    python = environment(release)
    done = run(python, "-m", "tests.versions", "--look")
    if done.returncode:
        return [(IMPORTS, False, done.stderr.strip().splitlines()[-1])]
    wrong = json.loads(done.stdout.splitlines()[-1])
    found = [(name, not w, "<br>".join(w) or "yes") for name, w in wrong.items()]
    if SUPPORTED[release] and release != HERE:  # here they are `make test`
        for name, files in TESTS.items():
            print(f"{release}: {name}", file=sys.stderr, flush=True)
            found.append((name, *run_tests(python, files)))
    return found


def table(results: dict[str, list[tuple[str, bool, str]]]) -> str:
    lines = ["| vLLM | check | passes | found |", "|---|---|---|---|"]
    for release, found in results.items():
        for name, passed, what in found:
            lines.append(
                f"| {release} | {name} | {'yes' if passed else 'NO'} | {what} |"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--look", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("releases", nargs="*", default=list(SUPPORTED))
    args = parser.parse_args()
    if args.look:
        print(json.dumps(look()))
        return 0
    results = {release: check(release) for release in args.releases}
    text = table(results)
    print(text, end="")
    if args.save:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2])
    as_expected = all(
        all(passed for _, passed, _ in found) == SUPPORTED[release]
        for release, found in results.items()
    )
    return 0 if as_expected else 1


if __name__ == "__main__":
    sys.exit(main())
