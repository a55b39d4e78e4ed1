# SPDX-License-Identifier: Apache-2.0
"""A running server: metrics, the inspect endpoint and the command that draws it."""

import json
import re
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.harness import (
    RING,
    complete,
    engine,
    random_prompts,
    sampling_params,
    server,
    tiny_tokenizer,
)
from vllm_ringwindow.cli import main
from vllm_ringwindow.geometry import ring_blocks
from vllm_ringwindow.metrics import COUNTERS, GAUGES, PREFIX, EngineCounts
from vllm_ringwindow.state import engine_state, request_state

W, BLOCK = 64, 32
R = ring_blocks(W, BLOCK)
DOCS = Path(__file__).parent.parent / "docs"
PLUGINS = {"VLLM_PLUGINS": "ringwindow,ringwindow-inspect"}
KEY = "secret"


@pytest.fixture(scope="module")
def gemma(models):
    return tiny_tokenizer(models("gemma3", W))


# -- in this process -------------------------------------------------------------------


@pytest.mark.engine
def test_counts_tell_what_the_pool_did(gemma):
    """Fresh blocks for the prompt, then recycled ones; all given back at the end."""
    with engine(gemma, RING, enable_prefix_caching=False) as e:
        counts = EngineCounts(e.scheduler)
        groups = len(e.rings)
        seen = []
        e.after_schedule.append(lambda _: seen.append(counts()))
        e.run(random_prompts([2 * W]), 8 * W)
        after_prompt, last = seen[0], seen[-1]
        assert after_prompt["fresh_blocks"] == last["fresh_blocks"] == groups * R
        new = (2 * W + 8 * W - 1 - 1) // BLOCK + 1 - 2 * W // BLOCK
        assert last["recycled_blocks"] == groups * new
        assert last["rings"] == groups
        assert {s["ring_blocks"] for s in seen} == {groups * R}
        end = counts()
        assert end["released_blocks"] == groups * R
        assert end["rings"] == end["ring_blocks"] == 0


@pytest.mark.engine
def test_a_deferred_hit_is_counted(gemma):
    """Two requests of one prefix in one step: the second waits (I8)."""
    with engine(gemma, RING) as e:
        prefix = random_prompts([4 * W])[0]
        e.run([prefix, prefix + [5, 6, 7]], 4)
        assert EngineCounts(e.scheduler)()["deferred_hits"] > 0


@pytest.mark.engine
def test_every_slot_holds_what_it_should_at_every_step(gemma):
    """And a slot whose block is gone, or held twice, is flagged."""
    with engine(gemma, RING) as e:
        wrong, looked = [], []

        def look(_):
            for request_id in e.scheduler.requests:
                state = request_state(e.scheduler, request_id)
                for group in state["groups"]:
                    assert len(group["slots"]) <= R
                    for slot in group["slots"]:
                        first, last = slot["positions"]
                        assert first == slot["logical_block"] * BLOCK
                        assert last - first == BLOCK - 1
                        assert slot["logical_block"] % R == slot["slot"]
                        looked.append(slot)
                        if slot["wrong"]:
                            wrong.append(slot)

        e.after_schedule.append(look)
        e.run(random_prompts([10, 3 * W, 5 * W + 3]), 3 * W, arrive=[0, 3, 9])
        assert len(looked) > 1000
        assert wrong == []

        e.after_schedule.clear()
        request_id = e.add(random_prompts([3 * W])[0], sampling_params(W))
        for _ in range(3):
            e.step()
        blocks = e.rings[0].req_to_blocks
        (key,) = blocks
        row = blocks[key]
        kept = row[-1]
        row[-1] = row[-2]
        flagged = [s["wrong"] for s in _slots(request_state(e.scheduler, key))]
        assert any("its block also holds" in (w or "") for w in flagged)
        row[-1] = e.rings[0]._null_block
        flagged = [s["wrong"] for s in _slots(request_state(e.scheduler, key))]
        assert "in the window, but without a block" in flagged
        row[-1] = kept
        assert request_id in key
        assert request_state(e.scheduler, "nobody") is None


def _slots(state):
    return state["groups"][0]["slots"]


@pytest.mark.engine
def test_state_has_no_prompt_content(gemma):
    with engine(gemma, RING) as e:
        e.add([7] * 200, sampling_params(8))
        e.step()
        text = json.dumps(engine_state(e.scheduler))
        assert '"computed_tokens": 200' in text
        assert "7, 7" not in text


def test_every_metric_of_the_dashboard_exists():
    known = {PREFIX + name for name in GAUGES}
    known |= {f"{PREFIX}{name}_total" for name in COUNTERS}
    text = (DOCS / "grafana.json").read_text()
    used = set(re.findall(r"vllm:ringwindow_\w+", text))
    assert used == known
    json.loads(text)


# -- vllm serve ------------------------------------------------------------------------


def get(url: str, key: str | None = KEY) -> str:
    request = urllib.request.Request(url)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    return urllib.request.urlopen(request, timeout=30).read().decode()


def metrics(url: str) -> dict[str, float]:
    found = re.findall(rf"^{PREFIX}(\w+)\{{.*\}} (\S+)$", get(f"{url}/metrics"), re.M)
    return {name: float(value) for name, value in found if "created" not in name}


@pytest.mark.slow
@pytest.mark.engine
def test_metrics_and_inspect_of_a_loaded_server(gemma, tmp_path, capsys, monkeypatch):
    options = ["--attention-backend", "ring", "--block-size", str(BLOCK)]
    options += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
    options += ["--kv-cache-memory-bytes", str(1 << 27), "--api-key", KEY]
    options += ["--no-enable-prefix-caching"]
    log = tmp_path / "log"
    with server(gemma, *options, log=log, env=PLUGINS) as url:
        groups = 5
        before = metrics(url)
        assert set(before) == {*GAUGES, *(f"{name}_total" for name in COUNTERS)}
        assert before["rings"] == 0 and before["fresh_blocks_total"] == 0

        body = dict(prompt="a" * (3 * W), max_tokens=1500, ignore_eos=True, api_key=KEY)
        thread = threading.Thread(target=complete, args=(url,), kwargs=body)
        thread.start()
        early = wait_for(url, lambda m: m["recycled_blocks_total"] > 0)
        assert early["rings"] == groups and early["ring_blocks"] == groups * R
        assert early["staging_bytes"] > 0
        later = wait_for(
            url,
            lambda m: m["recycled_blocks_total"] > early["recycled_blocks_total"] + 20,
        )
        assert later["fresh_blocks_total"] == early["fresh_blocks_total"] == groups * R

        # The engine's state, and one request drawn, while it runs.
        assert main(["inspect", url, "--api-key", KEY, "--json"]) == 0
        (state,) = json.loads(capsys.readouterr().out)["engines"]
        assert [g["ring_blocks"] for g in state["groups"]] == [R] * groups
        (request,) = state["requests"]
        assert request["status"] == "running"
        command = ["inspect", url, "--api-key", KEY, "--request", request["id"]]
        assert main(command) == 0
        drawn = capsys.readouterr().out
        assert "every slot holds the positions it should" in drawn
        assert drawn.count("being filled") == groups
        thread.join()

        idle = wait_for(url, lambda m: m["rings"] == 0)
        assert idle["released_blocks_total"] == idle["fresh_blocks_total"]
        assert main([*command[:-1], "nobody"]) == 2
        assert "no request 'nobody'" in capsys.readouterr().err
        monkeypatch.delenv("VLLM_API_KEY", raising=False)
        assert main(["inspect", url]) == 2
        assert "wants a key" in capsys.readouterr().err
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(f"{url}/v1/ringwindow", key=None)


def wait_for(url: str, condition) -> dict[str, float]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = metrics(url)
        if condition(found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"never so: {found}")
