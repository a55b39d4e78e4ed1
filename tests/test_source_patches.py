# SPDX-License-Identifier: Apache-2.0
"""``patches/``: they apply, and vLLM with them needs none of ``compat``."""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import vllm

from tests.harness import (
    ANSWERS,
    RING,
    complete,
    random_prompts,
    run,
    server,
    tiny_tokenizer,
)
from tests.patched import WINDOWS
from tests.test_coordinator import block_ids
from tests.test_serving import KEY, PLUGINS, get, metrics
from tests.test_simulated_scheduler import busy
from vllm_ringwindow.compat import PATCHES

ROOT = Path(__file__).parent.parent
SERIES = ROOT / "patches" / "vllm-0.32"
FILES = sorted(SERIES.glob("*.patch"))
INSTALLED = Path(vllm.__file__).parent

pytestmark = pytest.mark.skipif(
    not vllm.__version__.startswith("0.32."), reason="the series is for vLLM 0.32"
)


def changed(patch: Path) -> list[str]:
    return re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.M)


def apply(tree: Path, series: Path = SERIES) -> subprocess.CompletedProcess:
    command = [ROOT / "patches" / "apply.sh", tree, series]
    return subprocess.run(command, capture_output=True, text=True)


def copy_changed_files(tree: Path) -> Path:
    """Only the files of vLLM that the series changes."""
    for name in {name for patch in FILES for name in changed(patch)}:
        source, target = INSTALLED.parent / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.exists():
            shutil.copy(source, target)
    return tree


def copy_or_link(source: str, target: str) -> None:
    """Large binaries stay where they are; times are kept, so caches stay valid."""
    if source.endswith(".so"):
        os.symlink(source, target)
    else:
        shutil.copy2(source, target)


@pytest.fixture(scope="module")
def patched(tmp_path_factory) -> str:
    """The ``PYTHONPATH`` of a patched copy of the installed vLLM."""
    tree = tmp_path_factory.mktemp("patched")
    shutil.copytree(INSTALLED, tree / "vllm", copy_function=copy_or_link)
    done = apply(tree)
    assert done.returncode == 0, done.stderr
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(filter(None, [str(tree), str(ROOT), *others]))


@pytest.fixture(scope="module")
def gemma(models):
    return tiny_tokenizer(models("gemma3", 64))


# -- the series ------------------------------------------------------------------------


@pytest.mark.parametrize("patch", FILES, ids=lambda patch: patch.name[:4])
def test_each_patch_applies_alone(tmp_path, patch):
    """So that each can be merged alone."""
    series = tmp_path / "series"
    series.mkdir()
    shutil.copy(patch, series)
    done = apply(copy_changed_files(tmp_path / "tree"), series)
    assert done.returncode == 0, done.stderr


def test_a_patch_that_does_not_fit_is_named(tmp_path):
    tree = copy_changed_files(tmp_path)
    victim = FILES[4]
    (name, *_) = set(changed(victim)) - set(changed(FILES[1]))
    (tree / name).write_text("# rewritten upstream\n")
    before = {path: path.read_text() for path in tree.rglob("*.py")}
    done = apply(tree)
    assert done.returncode == 1
    assert f"{victim.name} does not apply to {tree}" in done.stderr
    assert before == {path: path.read_text() for path in tree.rglob("*.py")}


def test_nothing_in_a_repository_above_is_touched_or_skipped(tmp_path):
    """site-packages often lie in a virtual environment in some repository."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    tree = copy_changed_files(tmp_path / "venv" / "site-packages")
    assert apply(tree).returncode == 0
    for name in changed(FILES[0]):
        assert (tree / name).read_text() != (INSTALLED.parent / name).read_text()


@pytest.mark.parametrize("patch", FILES, ids=lambda patch: patch.name[:4])
def test_the_hooks_are_for_any_plugin(patch):
    """No name of ours in vLLM."""
    added = [line for line in patch.read_text().splitlines() if line[:1] == "+"]
    assert not re.search(r"\bring\b|ring_?window", "\n".join(added), re.I)


def test_the_catalogue_is_complete():
    text = (ROOT / "patches" / "README.md").read_text()
    listed = re.findall(r"^\| (\d{4}) \|", text, re.M)
    assert listed == [patch.name[:4] for patch in FILES]
    for patch in PATCHES:
        assert f"`{patch.name}`" in text, patch.name


# -- vLLM with the series --------------------------------------------------------------


@pytest.mark.slow
def test_the_plugin_then_needs_no_runtime_patch(patched, gemma):
    result = subprocess.run(
        [sys.executable, "-m", "tests.patched", gemma],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": patched},
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    (line,) = (s for s in result.stdout.splitlines() if s.startswith(ANSWERS))
    answers = json.loads(line.removeprefix(ANSWERS))
    assert answers["vllm"].startswith(patched.split(os.pathsep)[0])
    assert answers["states"] == {patch.name: "NOT_NEEDED" for patch in PATCHES}
    assert answers["wrapped"] == []
    assert "unknown key 'metricz'" in answers["refused"]
    # The same blocks, step by step, as with the runtime patches.
    here = {str(w): block_ids(busy(gemma, windows=w)) for w in WINDOWS}
    assert answers["scheduled"] == json.loads(json.dumps(here))


@pytest.mark.slow
@pytest.mark.engine
def test_rings_of_a_patched_server_are_those_of_the_runtime_patches(
    patched, gemma, tmp_path
):
    """Processes as ``vllm serve`` starts them; metrics and state by vLLM's hooks."""
    prompts = random_prompts([40, 200, 700])
    prompts.append(prompts[-1])  # a prefix hit, in the same step or later
    expected = run(gemma, RING, prompts, 40)
    options = ["--attention-backend", "ring", "--block-size", "32", "--api-key", KEY]
    options += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
    options += ["--kv-cache-memory-bytes", str(1 << 27)]
    log = tmp_path / "log"
    env = PLUGINS | {"PYTHONPATH": patched}
    with server(gemma, *options, log=log, env=env) as url:

        def ask(prompt):
            body = dict(max_tokens=40, ignore_eos=True, return_token_ids=True)
            choice = complete(url, KEY, prompt=prompt, **body)
            return tuple(choice["token_ids"])

        with ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(ask, prompts)) == [o.tokens for o in expected]
        assert metrics(url)["fresh_blocks_total"] > 0
        (state,) = json.loads(get(f"{url}/v1/ringwindow"))["engines"]
        assert len(state["groups"]) == 5 and state["decision"]
    assert "ring: on rings: 5 layers" in log.read_text()
