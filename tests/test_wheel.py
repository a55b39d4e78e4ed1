# SPDX-License-Identifier: Apache-2.0
"""What is installed: the package, its entry points, and nothing else."""

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from a copy: a build leaves folders behind."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("vllm_ringwindow", "tests", "benchmarks"):
        ignore = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    out = source / "out"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps"]
    subprocess.run(
        [*command, "--no-build-isolation", "-w", str(out), "."], cwd=source, check=True
    )
    (file,) = out.iterdir()
    return zipfile.ZipFile(file)


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    there = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "vllm_ringwindow").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert set(names) == there
    assert "vllm_ringwindow/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_entry_points_and_extras(wheel):
    def text(name: str) -> str:
        (found,) = [n for n in wheel.namelist() if n.endswith(f".dist-info/{name}")]
        return wheel.read(found).decode()

    entries = configparser.ConfigParser()
    entries.read_string(text("entry_points.txt"))
    assert dict(entries["vllm.general_plugins"]) == {
        "ringwindow": "vllm_ringwindow:register"
    }
    assert "vllm-ringwindow" in entries["console_scripts"]
    metadata = text("METADATA").splitlines()
    required = [x for x in metadata if x.startswith("Requires-Dist:")]
    always = [x for x in required if "extra ==" not in x]
    assert always == ["Requires-Dist: rich"]
    extras = {x.split()[1] for x in metadata if x.startswith("Provides-Extra:")}
    assert extras == {"cpu", "cuda", "batch", "serve", "plots", "bench", "dev"}
