# SPDX-License-Identifier: Apache-2.0
"""What is missing is said in a sentence; what was not asked for costs nothing."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What the package requires: rich, and what rich requires.
REQUIRED = ("rich", "pygments", "markdown_it", "mdurl")

MAIN = "import sys; from vllm_ringwindow.cli import main; sys.exit(main({}))"


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Runs code in a Python that has the package, its requirements and no more."""
    packages = tmp_path_factory.mktemp("packages")
    for name in REQUIRED:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        (packages / name).symlink_to(Path(spec.origin).parent)
    (packages / "vllm_ringwindow").symlink_to(ROOT / "vllm_ringwindow")

    def run(code: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-S", "-B", "-c", code],  # no site-packages
            capture_output=True,
            text=True,
            cwd=packages,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(packages)},
        )

    return run


def with_vllm(code: str, **env: str) -> str:
    """Stdout of code in a fresh process of this environment."""
    # vLLM's own log goes to stderr.
    env = {"VLLM_LOGGING_STREAM": "ext://sys.stderr", **env}
    command = [sys.executable, "-c", code]
    return subprocess.check_output(command, text=True, cwd=ROOT, env=os.environ | env)


# -- without vLLM, torch or Ray --------------------------------------------------------


def test_the_package_imports_without_vllm_and_torch(bare):
    done = bare(
        "import sys, vllm_ringwindow, vllm_ringwindow.geometry\n"
        "assert not {'vllm', 'torch', 'ray'} & set(sys.modules)\n"
        "import importlib.util as u\n"
        "assert not any(map(u.find_spec, ('vllm', 'torch', 'ray', 'pydantic')))"
    )
    assert done.returncode == 0, done.stderr


def test_registering_without_vllm_is_a_sentence(bare):
    done = bare("import vllm_ringwindow; vllm_ringwindow.register()")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert "needs vLLM >=0.32" in line and "install vllm-ringwindow[cpu] or" in line


@pytest.mark.parametrize(
    "command, package, extra",
    [
        (["plan", "a-model"], "vllm", "cpu"),
        (["verify", "a-model"], "vllm", "cpu"),
        (["batch", "in.jsonl", "out", "--model", "a-model"], "ray", "batch"),
    ],
)
def test_a_command_says_what_to_install(bare, command, package, extra):
    done = bare(MAIN.format(command))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"vllm-ringwindow {command[0]}: needs {package}, which is not installed here: "
        f"pip install 'vllm-ringwindow[{extra}]'"
    )


def test_doctor_says_what_to_install(bare):
    done = bare(MAIN.format(["doctor", "--json"]))
    assert done.returncode == 1
    assert "pip install 'vllm-ringwindow[cpu]' or 'vllm-ringwindow[cuda]'" in (
        done.stdout
    )
    assert "Traceback" not in done.stdout + done.stderr


def test_inspect_needs_no_vllm(bare):
    done = bare(MAIN.format(["inspect", "http://127.0.0.1:9"]))
    assert done.returncode == 2
    assert "cannot reach http://127.0.0.1:9" in done.stderr


def test_batch_without_ray_writes_nothing(tmp_path, capsys, monkeypatch):
    from vllm_ringwindow.cli import main

    monkeypatch.setitem(sys.modules, "ray", None)
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    out = tmp_path / "out"
    assert main(["batch", str(rows), str(out), "--model", str(tmp_path)]) == 2
    assert "pip install 'vllm-ringwindow[batch]'" in capsys.readouterr().err
    assert not out.exists()


def test_another_missing_module_is_no_business_of_ours(monkeypatch):
    from vllm_ringwindow.cli import main

    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)
    monkeypatch.setattr("vllm_ringwindow.cli._EXTRAS", {})
    with pytest.raises(ModuleNotFoundError):
        main(["plan", "a-model"])


# -- beside vLLM -----------------------------------------------------------------------


def test_registering_loads_eight_small_modules_and_nothing_of_others():
    """What it costs: no backend, no command, nothing that vLLM would not load."""
    code = """
import sys
import vllm.model_executor.layers.attention, vllm.v1.engine.core
import vllm.v1.core.sched.scheduler, vllm.v1.metrics.loggers
before = set(sys.modules)
import vllm_ringwindow
vllm_ringwindow.register()
print(*sorted(set(sys.modules) - before))
"""
    ours = "compat config core core.manager core.spec geometry policy"
    loaded = ["vllm_ringwindow", *(f"vllm_ringwindow.{name}" for name in ours.split())]
    assert with_vllm(code).split() == loaded


@pytest.mark.parametrize("plugins, loaded", [("", False), ("ringwindow", True)])
def test_vllm_plugins_decides_whether_anything_is_touched(plugins, loaded):
    code = """
import sys
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.model_executor.layers.attention import Attention
load_general_plugins()
print(
    "vllm_ringwindow" in sys.modules,
    "RING" in AttentionBackendEnum.__members__,
    hasattr(Attention.get_kv_cache_spec, "_ringwindow_original"),
)
"""
    assert with_vllm(code, VLLM_PLUGINS=plugins).split() == [str(loaded)] * 3
