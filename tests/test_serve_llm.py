# SPDX-License-Identifier: Apache-2.0
"""Ray Serve LLM, without GPUs: the code block of ``docs/operating.md`` itself."""

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import cloudpickle
import pytest

from tests.harness import (
    ANSWERS,
    STOCK,
    TEST_ENVIRONMENT,
    engine,
    had_rings,
    sampling_params,
    tiny_tokenizer,
)
from vllm_ringwindow.policy import ring_requested

W = 64
ROOT = Path(__file__).parent.parent
PROMPT = "ring window block slot " * 8
LIMIT = 512  # tokens of prompt and answer
REQUEST = {"model": "gemma", "prompt": PROMPT, "temperature": 0, "max_tokens": 2 * W}
COMPLETION = ("/v1/completions", REQUEST | {"ignore_eos": True})


@pytest.fixture(scope="module")
def gemma(models):
    return tiny_tokenizer(models("gemma3", W, vocab_size=320))


def documented(model: Path, **config: object) -> str:
    """The documented code with a model that is here, and more of ``LLMConfig``."""
    text = (ROOT / "docs" / "operating.md").read_text()
    (section,) = re.findall(r"^## Ray Serve\n(.*?)^## ", text, re.S | re.M)
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.S | re.M)
    options = {"dtype": "float32", "enforce_eager": True, "block_size": 32}
    options |= {"max_model_len": LIMIT, "kv_cache_memory_bytes": 1 << 27}
    replace = {
        '"google/gemma-3-270m-it"': repr(str(model)),
        '"max_model_len": 8192': f"**{options!r}",
        "LLMConfig(\n": f"LLMConfig(\n    **{config!r},\n",
    }
    for old, new in replace.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


# -- configs (H1) ----------------------------------------------------------------------

RELAY = """
import pickle, sys
from vllm import plugins
assert not plugins.plugins_loaded
config = pickle.load(sys.stdin.buffer)
assert plugins.plugins_loaded
import cloudpickle
sys.stdout.buffer.write(b"\\0" + cloudpickle.dumps(config))
"""


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")
def test_the_engines_config_survives_rays_pickling(gemma):
    """With GPUs a task makes it, and a replica without plugins unpickles it."""
    from ray.llm._internal.serve.engines.vllm.vllm_engine import _get_vllm_engine_config

    names: dict = {}
    exec(documented(gemma).split("serve.run(")[0], names)
    config = pickle.loads(cloudpickle.dumps(names["config"]))
    sent = _get_vllm_engine_config(config)
    assert sent[1].parallel_config.distributed_executor_backend == "mp"
    assert ring_requested(sent[1])
    relayed = subprocess.run(
        [sys.executable, "-c", RELAY],
        input=cloudpickle.dumps(sent),
        capture_output=True,
    )
    assert relayed.returncode == 0, relayed.stderr.decode()
    received = pickle.loads(relayed.stdout.partition(b"\0")[2])
    assert received == sent
    assert ring_requested(received[1])


# -- deployments -----------------------------------------------------------------------


class Served(NamedTuple):
    """What became of each code that was to deploy."""

    answers: list[tuple[str, list[str]]]  # error, bodies of the requests
    log: str  # of every process in the cluster


def serve(codes: list[str], requests: list[tuple], **env: str) -> Served:
    """Run ``serve_job``; of its processes, whatever happens, none is left."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    # Commands that ran in this process have set where vLLM logs to.
    leave = (*TEST_ENVIRONMENT, "VLLM_LOGGING_STREAM")
    env = {
        **{k: v for k, v in os.environ.items() if k not in leave},
        **{"VLLM_LOGGING_LEVEL": "INFO", "RAY_USAGE_STATS_ENABLED": "0"},
        **env,
    }
    # Not tmp_path: Ray's sockets are below it, and their paths must be short.
    with tempfile.TemporaryDirectory(
        prefix="serve", ignore_cleanup_errors=True
    ) as directory:
        job = dict(codes=codes, requests=requests, port=port, directory=directory)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve_job"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(json.dumps(job), timeout=500)
        finally:
            kill_session(process.pid)
            process.wait()
        assert process.returncode == 0, said[-5000:]
        (line,) = (s for s in said.splitlines() if s.startswith(ANSWERS))
        logs = sorted(Path(directory).glob("session_2*/logs/worker-*.out"))
        return Served(
            json.loads(line.removeprefix(ANSWERS)),
            "\n".join(log.read_text() for log in logs),
        )


def kill_session(leader: int) -> None:
    """Ray starts its processes in its driver's session."""
    for _ in range(50):
        members = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError):
                if os.getsid(int(entry.name)) == leader:
                    members.append(int(entry.name))
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if set(members) <= {leader}:
            return
        time.sleep(0.1)
    raise AssertionError(f"still there: {members}")


@pytest.fixture(scope="module")
def served(gemma) -> Served:
    """One cluster: the documented config without the plugin, then as it is."""
    without_plugin = documented(
        gemma,
        runtime_env={"env_vars": {"VLLM_PLUGINS": ""}},
        deployment_config={"max_constructor_retry_count": 1},
    )
    return serve([without_plugin, documented(gemma)], [COMPLETION])


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.feature("Ray Serve LLM", "works")
def test_the_documented_config_serves_rings(gemma, served):
    """One completion, longer than the window, over HTTP."""
    error, (body,) = served.answers[1]
    assert not error
    had_rings.append("ring: on rings: 5 layers in 5 groups" in served.log)
    assert had_rings == [True]
    with engine(gemma, STOCK, skip_tokenizer_init=False, max_model_len=LIMIT) as e:
        params = sampling_params(2 * W, detokenize=True, logprobs=None)
        (expected,) = e.llm.generate([PROMPT], params, use_tqdm=False)
    assert len(expected.prompt_token_ids) > 2 * W
    assert json.loads(body)["choices"][0]["text"] == expected.outputs[0].text


@pytest.mark.slow
@pytest.mark.engine
def test_a_replica_without_the_plugin_says_what_it_lacks(served):
    error, bodies = served.answers[0]
    assert "Unknown attention backend: 'RING'" in error
    assert not bodies


@pytest.mark.long
@pytest.mark.engine
def test_direct_streaming_answers_metrics_and_inspect(gemma):
    served = serve(
        [documented(gemma)],
        [COMPLETION, ("/metrics", None), ("/v1/ringwindow", None)],
        RAY_SERVE_ENABLE_HA_PROXY="1",
        RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING="1",
        VLLM_PLUGINS="ringwindow,ringwindow-inspect",
    )
    ((error, (completion, metrics, state)),) = served.answers
    assert not error and "choices" in completion
    (recycled,) = re.findall(
        r"^vllm:ringwindow_recycled_blocks_total{.*} (.*)$", metrics, re.M
    )
    assert float(recycled) > 0
    (found,) = json.loads(state)["engines"]
    assert "on rings: 5 layers" in found["decision"][0]
