# SPDX-License-Identifier: Apache-2.0
"""The command line: plan, doctor, and what wrong use is told."""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

from benchmarks.shapes import SHAPES
from tests.harness import RING, STOCK, engine, random_prompts
from vllm_ringwindow.cli import main
from vllm_ringwindow.config import RingConfig, ring_config
from vllm_ringwindow.core.manager import RingBlockManager
from vllm_ringwindow.report import decision

W = 64


@pytest.fixture(scope="module")
def gemma(models):
    return models("gemma3", W)


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    """Directories with a real model's config.json and nothing else."""
    root = tmp_path_factory.mktemp("shapes")

    def directory(key: str) -> Path:
        path = root / key
        if not path.exists():
            SHAPES[key].config.save_pretrained(path)
        return path

    return directory


def call(capfd, *args) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    capfd.readouterr()
    try:
        code = main([str(arg) for arg in args])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capfd.readouterr()
    return code, captured.out, captured.err


# -- plan ------------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.parametrize("backend", ["ring", "stock"])
@pytest.mark.parametrize("caching", [True, False])
def test_plan_agrees_with_an_engine(gemma, capfd, backend, caching):
    """Tokens, concurrency, blocks, R and the start-up lines, to the last digit."""
    options = ["--max-model-len", 1024, "--block-size", 32]
    options += ["--max-num-batched-tokens", 256, "--dtype", "float32"]
    options += [] if caching else ["--no-enable-prefix-caching"]
    code, out, _ = call(
        capfd, "plan", gemma, *options, "--kv-memory", "16MiB", "--json"
    )
    assert code == 0
    plan = json.loads(out)
    with engine(
        gemma,
        RING if backend == "ring" else STOCK,
        max_model_len=1024,
        max_num_batched_tokens=256,
        enable_prefix_caching=caching,
        kv_cache_memory_bytes=16 << 20,
        num_gpu_blocks_override=None,
    ) as e:
        config = e.llm.llm_engine.vllm_config
        tokens, concurrency = get_kv_cache_capacity(config, e.kv.kv_cache_config)
        fit = plan["fits"][backend]
        assert fit["tokens"] == tokens
        assert fit["concurrency"] == pytest.approx(concurrency)
        assert fit["blocks"] == e.kv.kv_cache_config.num_blocks
        if backend == "ring":
            assert plan["decision"] == decision(config, e.kv.kv_cache_config)
            found = [m.num_ring_blocks for m in e.rings]
            said = [g["ring_blocks"] for g in plan["groups"] if g["ring_blocks"]]
            assert said == found == [3] * 5


@pytest.mark.engine
def test_the_least_memory_starts_and_one_block_less_does_not(gemma, capfd):
    options = ["--max-model-len", 1024, "--block-size", 32, "--dtype", "float32"]
    _, out, _ = call(capfd, "plan", gemma, *options, "--json")
    plan = json.loads(out)
    least = plan["fits"]["ring"]["least_bytes"]
    assert least < plan["fits"]["stock"]["least_bytes"]

    def start(num_bytes: int) -> None:
        with engine(
            gemma,
            RING,
            max_model_len=1024,
            max_num_batched_tokens=plan["batched_tokens"],
            kv_cache_memory_bytes=num_bytes,
            num_gpu_blocks_override=None,
        ) as e:
            e.run(random_prompts([1000]), 8)

    start(least)
    with pytest.raises(ValueError, match="at least one request"):
        start(least - plan["block_bytes"])


def test_plan_of_a_real_shape(shape, capfd, tmp_path):
    """Gemma 3 27B from its config.json alone, and the picture."""
    picture = tmp_path / "plan.png"
    code, out, _ = call(
        capfd,
        *("plan", shape("gemma3-27b") / "config.json", "--max-model-len", 16384),
        *("--block-size", 32, "--max-num-batched-tokens", 8192),
        *("--kv-memory", "40GiB", "--json", "--plot", picture),
    )
    assert code == 0
    plan = json.loads(out)
    kinds = {k["kind"]: k for k in plan["layers"]}
    sliding = kinds["sliding window, on rings"]
    assert (sliding["layers"], sliding["window"]) == (52, 1024)
    assert (sliding["kv_heads"], sliding["head_size"]) == (16, 128)
    assert kinds["full attention"]["layers"] == 10
    # cdiv(W - 1, 32) + 1, by hand.
    assert {g["ring_blocks"] for g in plan["groups"]} == {33, None}
    fits = plan["fits"]
    ratio = fits["ring"]["concurrency"] / fits["stock"]["concurrency"]
    assert ratio > 2
    longest = plan["per_request"][-1]
    assert longest["tokens"] == 16384
    assert longest["hybrid off"] > longest["stock"] > longest["ring"]
    assert longest["stock"] / longest["ring"] == pytest.approx(ratio, rel=0.02)
    assert plan["advice"].startswith("Use it")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("tensor", [2, 4])
def test_plan_divides_heads_among_ranks(shape, capfd, tensor):
    """Half the heads, half the bytes; the number of blocks doubles."""
    options = ["--max-model-len", 16384, "--kv-memory", "8GiB", "--json"]
    found = []
    for ranks in (1, tensor):
        _, out, _ = call(
            capfd,
            *("plan", shape("gemma3-27b"), *options),
            *("--tensor-parallel-size", ranks),
        )
        found.append(json.loads(out)["fits"]["ring"]["blocks"])
    assert found[1] == pytest.approx(tensor * found[0], rel=0.01)


@pytest.mark.parametrize(
    ("key", "options", "advice"),
    [
        (
            "mistral-7b",
            ["--max-model-len", 4096],
            "Do not bother: no request",
        ),
        (
            "gemma3-1b",
            ["--prefix-cache-retention-interval", "None"],
            "Do not bother: with a dense",
        ),
        ("gemma3-1b", ["--max-model-len", 8192], "Use it"),
    ],
)
def test_advice(shape, capfd, key, options, advice):
    code, out, _ = call(capfd, "plan", shape(key), *options)
    assert code == 0
    assert advice in " ".join(out.split())


def test_plan_says_what_does_not_start(shape, capfd):
    code, out, _ = call(
        capfd,
        *("plan", shape("gemma3-27b"), "--max-model-len", 16384),
        *("--kv-memory", "64MiB"),
    )
    assert code == 0
    assert "does not start" in out


# -- doctor ----------------------------------------------------------------------------


def run_doctor(**environment) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
    return subprocess.run(
        [Path(sys.executable).parent / "vllm-ringwindow", "doctor", "--json"],
        capture_output=True,
        text=True,
        env=env | environment,
    )


@pytest.mark.slow
def test_doctor_finds_this_environment_ready():
    done = run_doctor()
    findings = {f["about"]: f for f in json.loads(done.stdout)}
    assert done.returncode == 0, findings
    for about in ("a fresh process", "a spawned process", "routing", "patch: routing"):
        assert findings[about]["status"] == "ok"


@pytest.mark.slow
def test_doctor_says_when_a_spawned_process_does_not_see_the_plugin():
    done = run_doctor(VLLM_PLUGINS="lora_filesystem_resolver")
    findings = {f["about"]: f for f in json.loads(done.stdout)}
    assert done.returncode == 1
    assert findings["a fresh process"]["status"] == "FAIL"
    assert "VLLM_PLUGINS" in findings["a fresh process"]["fix"]
    wanted = "VLLM_PLUGINS=lora_filesystem_resolver,ringwindow"
    assert wanted in findings["VLLM_PLUGINS"]["fix"]


# -- the plugin's own options ----------------------------------------------------------


def given(options):
    return SimpleNamespace(additional_config={"ringwindow": options})


def test_nothing_needs_setting():
    assert ring_config(SimpleNamespace(additional_config={})) == RingConfig()
    assert ring_config(given({})) == RingConfig(metrics=True, rest=True, check=False)


@pytest.mark.engine
def test_options_reach_the_engine(gemma):
    config = {"ringwindow": {"rest": False, "check": True}}
    with engine(gemma, RING, additional_config=config) as e:
        assert not type(e.kv.coordinator).__name__.startswith("Resting")
        e.run(random_prompts([200]), 8)
        RingBlockManager.new_step_starts(e.rings[0])
        e.rings[0].counts.held += 1
        with pytest.raises(AssertionError, match="counted"):
            e.run(random_prompts([200]), 8)
        e.rings[0].counts.held -= 1


# -- wrong use -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def not_vllm():
    """A web server that is something else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/" else 404)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def wrong(tmp_path_factory, models, not_vllm):
    """Names for the paths in the table below."""
    root = tmp_path_factory.mktemp("wrong")
    for name, text in {
        "broken": "{",
        "list": "[1]",
        "anonymous": "{}",
        "unknown": '{"architectures": ["NoSuchModel"], "model_type": "nosuch"}',
    }.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(text)
    (root / "empty").mkdir()
    (root / "notes.txt").write_text("hello")
    return {
        "MODEL": models("gemma3", W),
        "FULL": models("mistral", W, sliding_window=None),
        "ROOT": root,
        "OTHER": not_vllm,
    }


# What is typed, what the one line says.
WRONG_USE = [
    ("", "the following arguments are required: command"),
    ("plam MODEL", "invalid choice: 'plam'"),
    ("plan", "the following arguments are required: model"),
    ("plan ROOT/nothing", "ROOT/nothing does not exist"),
    ("plan ROOT/empty", "is not a model directory: it has no config.json"),
    ("plan ROOT/notes.txt", "neither a model directory nor a config.json"),
    ("plan ROOT/broken", "is not JSON"),
    ("plan ROOT/list", "does not say 'architectures'"),
    ("plan ROOT/anonymous", "does not say 'architectures'"),
    ("plan ROOT/unknown", "nosuch"),
    ("plan MODEL --kv-memory -1GiB", "--kv-memory: expected one argument"),
    ("plan MODEL --kv-memory=-1GiB", "'-1GiB' is not a size"),
    ("plan MODEL --kv-memory 0", "'0' is not a size"),
    ("plan MODEL --kv-memory lots", "'lots' is not a size; examples: 24GiB"),
    ("plan MODEL --max-model-length 9", "unrecognized arguments: --max-model-length 9"),
    ("plan MODEL --max-model-len -5", "max_model_len=-5"),
    ("plan MODEL --block-size 0", "block_size=0"),
    ("plan MODEL --attention-backend rign", "RIGN"),
    ("plan MODEL --kv-cache-dtype fp9", "'fp9'"),
    (
        'plan MODEL --additional-config {"ringwindow":{"metricz":true}}',
        "unknown key 'metricz'; known keys: metrics, rest, check",
    ),
    (
        'plan MODEL --additional-config {"ringwindow":{"check":"yes"}}',
        "check='yes': input should be a valid boolean",
    ),
    (
        'plan MODEL --additional-config {"ringwindow":[]}',
        "expected an object of options, got []",
    ),
    ("plan MODEL --plot ROOT/nothing/plan.png", "--plot ROOT/nothing/plan.png"),
    ("plan MODEL --plot ROOT/plan.xyz", "--plot ROOT/plan.xyz"),
    ("plan MODEL --json ROOT/nothing/plan.json", "cannot write ROOT/nothing/plan.json"),
    ("verify MODEL --prompts ROOT/none.txt", "--prompts ROOT/none.txt: no such file"),
    ("verify MODEL --tolerance 0", "--tolerance 0.0: must be above 0"),
    ("verify MODEL --break everything", "invalid choice: 'everything'"),
    ("inspect localhost:8000", "is not an address; example: http://localhost:8000"),
    ("inspect http://127.0.0.1:9", "cannot reach http://127.0.0.1:9"),
    ("inspect OTHER", "OTHER is not a vLLM server"),
    ("inspect OTHER --interval 0", "'0' is not a number of at least 1"),
    ("inspect OTHER --watch --json", "--watch and --json exclude each other"),
    ("doctor --quick", "unrecognized arguments: --quick"),
]


@pytest.mark.parametrize(("typed", "told"), WRONG_USE, ids=[t for t, _ in WRONG_USE])
def test_wrong_use_is_told_in_one_line(wrong, capfd, typed, told):
    """Exit code 2, nothing on stdout, no traceback, the option or file by name."""
    for name, value in wrong.items():
        typed, told = typed.replace(name, str(value)), told.replace(name, str(value))
    code, out, err = call(capfd, *typed.split())
    assert code == 2
    line = err.strip().splitlines()[-1]
    assert line.startswith("vllm-ringwindow")
    assert told in line
    assert out == ""


def test_a_model_without_sliding_windows_is_planned_and_said(wrong, capfd):
    code, out, _ = call(capfd, "plan", wrong["FULL"])
    assert code == 0
    assert "Do not bother: no layer of this model goes on a ring" in out
