# SPDX-License-Identifier: Apache-2.0
"""``vllm-ringwindow verify``: passes on a sound ring, names what is broken."""

import base64
import io
import json
import re
import shutil
import subprocess
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from vllm_ringwindow.attention import builder
from vllm_ringwindow.attention.impl import RingImplMixin
from vllm_ringwindow.cli import main
from vllm_ringwindow.core.manager import RingBlockManager
from vllm_ringwindow.verification import Verification, compare, diagnosis, probe

W = 64
OPTIONS = [
    *("--skip-tokenizer-init", "--enforce-eager", "--block-size", "32"),
    *("--max-model-len", "1024", "--kv-cache-memory-bytes", str(1 << 27)),
]


@pytest.fixture(scope="module")
def gemma(models):
    return models("gemma3", W)


def verify(gemma, *options) -> tuple[int, dict]:
    """Exit code and result. Engines start in processes of their own."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
        code = main(["verify", str(gemma), *OPTIONS, "--json", *options])
    return code, json.loads(out.getvalue())


@pytest.fixture(scope="module")
def sound(gemma, tmp_path_factory):
    """Exit code, result and HTML page of a sound ring."""
    page = tmp_path_factory.mktemp("verify") / "report.html"
    return *verify(gemma, "--html", str(page)), page


@pytest.mark.slow
@pytest.mark.engine
def test_a_sound_ring_passes(sound):
    code, result, page = sound
    failed = [check for check in result["checks"] if not check["passed"]]
    assert (code, failed) == (0, [])
    assert len(result["checks"]) == 15
    assert result["window"] == W and result["ring_blocks"] == 3
    assert len(result["differences"]) == 3 * W + 32 // 2 + 7 - 1
    assert max(result["differences"]) < 1e-4
    text = page.read_text()
    assert "All checks passed" in text
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert len(images) == 2
    for image in images:
        assert base64.b64decode(image).startswith(b"\x89PNG")
    assert not re.search(r'(src|href)="(?!data:)', text)  # needs nothing else


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium")
def test_a_browser_draws_every_plot(sound):
    """The picture stays in ``artifacts/verify.png``."""
    page = sound[2]
    script = (
        "<script>onload=()=>{document.title='DRAWN '+[...document.images].filter("
        "i=>i.complete&&i.naturalWidth>100&&i.naturalHeight>100).length}</script>"
    )
    copy = page.with_name("copy.html")
    copy.write_text(page.read_text().replace("</body>", script + "</body>"))
    browser = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
    dom = subprocess.run(
        [*browser, "--dump-dom", copy.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "DRAWN 2" in dom.stdout
    picture = Path(__file__).parent.parent / "artifacts" / "verify.png"
    picture.parent.mkdir(exist_ok=True)
    subprocess.run(
        [*browser, f"--screenshot={picture}", "--window-size=1200,1500", page.as_uri()],
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert picture.stat().st_size > 20_000


@pytest.mark.slow
@pytest.mark.engine
def test_a_wrong_window_fails_and_is_named(gemma):
    code, result = verify(gemma, "--break", "window")
    assert code == 1 and not result["passed"]
    passed = {c["name"] for c in result["checks"] if c["passed"]}
    assert "layers are on rings" in passed
    assert f"logits, prompt of {W // 2} tokens (< W)" in passed
    assert "restart with the ring off" in passed
    hints = [check["hint"] for check in result["checks"] if not check["passed"]]
    wanted = f"acts like sliding_window {W - 1}, not {W}"
    assert any(wanted in hint for hint in hints), hints


@pytest.mark.engine
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (None, None),
        ("ring", "a ring of too few blocks"),
        ("copy-out", "copied to and from staging"),
    ],
)
def test_a_broken_ring_is_named(gemma, answers, monkeypatch, fault, named):
    """In this process, against stock's answers; unbroken it passes."""
    for owner, name in (
        (RingImplMixin, "forward"),
        (RingBlockManager, "__init__"),
        (builder, "staged_view"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back later
    ring = answers("RING", fault)
    found = compare("gemma", answers(), ring, answers())
    failed = [check for check in found.checks if not check.passed]
    if fault is None:
        assert failed == []
    else:
        assert any(named in check.hint for check in failed), failed


@pytest.fixture(scope="module")
def answers(gemma):
    """What an engine answers: stock's once, a broken ring's each time."""
    options = dict(
        model=str(gemma),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 27,
    )
    stock = {}

    def ask(backend=None, fault=None):
        if backend is None and stock:
            return stock
        engine = options | ({"attention_backend": backend} if backend else {})
        job = dict(engine=engine, text=None, fault=fault, brief=False)
        found = json.loads(json.dumps(probe(job, lambda text: None)))
        if backend is None:
            stock.update(found)
        return found

    return ask


def about(**fields) -> Verification:
    values = dict(
        model="m",
        dtype="float32",
        window=W,
        block_size=32,
        ring_blocks=3,
        tolerance=1e-3,
        decision=[],
    )
    return Verification(**(values | fields))


@pytest.mark.parametrize(
    ("at", "chunk", "told"),
    [
        (0, None, "from the first token on"),
        (10, None, "inside the first window"),
        (W - 2, None, "the window ends 2 tokens early: it acts like sliding_window 62"),
        (W, None, "a token beyond sliding_window 64 is still visible"),
        (66, None, "where the ring wraps"),
        (130, 65, "just after a chunk begins"),
    ],
)
def test_where_it_differs_says_what_to_look_at(at, chunk, told):
    differences = [0.0] * at + [0.1] * 50
    assert told in diagnosis(differences, about(), chunk)
    assert diagnosis([0.0] * 100, about(), chunk) == ""
