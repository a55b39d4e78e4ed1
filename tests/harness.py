# SPDX-License-Identifier: Apache-2.0
"""Real engines for the tests: start, run, look inside, compare.

Engines run in this process unless a test says otherwise. Every ring engine checks its
managers' integrity after each scheduled step (``check_integrity``).
"""

import gc
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm import LLM, SamplingParams

from benchmarks.models import load_reference, tiny_model
from vllm_ringwindow.core.manager import RingBlockManager
from vllm_ringwindow.policy import ring_requested

STOCK: dict[str, Any] = {}
RING: dict[str, Any] = {"attention_backend": "RING"}

DEFAULTS: dict[str, Any] = dict(
    dtype="float32",
    enforce_eager=True,
    skip_tokenizer_init=True,
    block_size=32,
    max_model_len=2048,
    max_num_seqs=16,
    max_num_batched_tokens=2048,
    num_gpu_blocks_override=800,
    kv_cache_memory_bytes=1 << 28,
)

# What ``conftest`` sets for engines in this process, and users do not have.
TEST_ENVIRONMENT = ("VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS")

# What the line with the outputs begins with; vLLM logs to stdout too.
ANSWERS = "ANSWERS "

_ids = itertools.count()

# For each engine or simulator asked for rings in the current test: whether it had them.
had_rings: list[bool] = []


class Output(NamedTuple):
    """What one request gave."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the tokens
    cached: int  # prompt tokens found in the prefix cache
    prompt_logprobs: tuple[float, ...] = ()


class Engine:
    """An in-process engine and the parts of it that tests look at."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.kv = self.scheduler.kv_cache_manager
        self.pool = self.kv.block_pool
        self.managers = self.kv.coordinator.single_type_managers
        self.rings = [m for m in self.managers if isinstance(m, RingBlockManager)]
        if ring_requested(llm.llm_engine.vllm_config):
            had_rings.append(bool(self.rings))
        self.steps: list[Any] = []  # SchedulerOutput of every step
        self.after_schedule: list[Callable[[Any], None]] = []
        schedule = self.scheduler.schedule

        def checked(*args, **kwargs):
            output = schedule(*args, **kwargs)
            self.steps.append(output)
            for ring in self.rings:
                ring.check_integrity()
            for hook in self.after_schedule:
                hook(output)
            return output

        self.scheduler.schedule = checked

    @property
    def num_free(self) -> int:
        return self.pool.get_num_free_blocks()

    @property
    def num_preemptions(self) -> int:
        return sum(len(s.preempted_req_ids or ()) for s in self.steps)

    def add(
        self, prompt: Sequence[int], params: SamplingParams, priority: int = 0
    ) -> str:
        request_id = f"r{next(_ids)}"
        self.llm.llm_engine.add_request(
            request_id,
            {"prompt_token_ids": list(prompt)},
            params,
            priority=priority,
        )
        return request_id

    def step(self) -> list[Any]:
        return [o for o in self.llm.llm_engine.step() if o.finished]

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 32,
        *,
        arrive: Sequence[int] | None = None,
        **sampling: Any,
    ) -> list[Output]:
        """Greedy by default. ``arrive[i]``: the step at which prompt i is added."""
        params = sampling_params(max_tokens, **sampling)
        arrive = arrive or [0] * len(prompts)
        ids: dict[str, int] = {}
        outputs: dict[int, Output] = {}
        for step in itertools.count():
            for i, at in enumerate(arrive):
                if at == step:
                    ids[self.add(prompts[i], params)] = i
            done = self.step()
            for finished in done:
                outputs[ids[finished.request_id]] = to_output(finished)
            if len(outputs) == len(prompts):
                break
            assert step < 100_000, "the engine does not finish"
        return [outputs[i] for i in range(len(prompts))]

    def reset_prefix_cache(self) -> None:
        assert self.llm.reset_prefix_cache()


def sampling_params(max_tokens: int, **sampling: Any) -> SamplingParams:
    values: dict[str, Any] = dict(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=1,
    )
    return SamplingParams(**(values | sampling))


def to_output(finished: Any) -> Output:
    first = finished.outputs[0]
    logprobs = first.logprobs or ()
    prompt_logprobs = finished.prompt_logprobs or ()
    return Output(
        tokens=tuple(first.token_ids),
        logprobs=tuple(lp[t].logprob for t, lp in zip(first.token_ids, logprobs)),
        cached=finished.num_cached_tokens or 0,
        prompt_logprobs=tuple(
            lp[t].logprob
            for t, lp in zip(finished.prompt_token_ids, prompt_logprobs)
            if lp is not None
        ),
    )


@contextmanager
def engine(
    model: str | Path, backend: dict[str, Any], **options: Any
) -> Iterator[Engine]:
    """An engine on ``model``; ``backend`` is ``STOCK``, ``RING`` or engine options."""
    llm = LLM(str(model), **(DEFAULTS | backend | options))
    running = Engine(llm)
    try:
        yield running
    finally:
        running.scheduler.__dict__.pop("schedule", None)
        llm.llm_engine.engine_core.shutdown()
        del running, llm
        gc.collect()


def run(
    model: str | Path,
    backend: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    max_tokens: int = 32,
    **options: Any,
) -> list[Output]:
    """Start an engine, run the prompts, stop it. Rings must be in use iff asked."""
    with engine(model, backend, **options) as running:
        assert bool(running.rings) == (backend is RING)
        return running.run(prompts, max_tokens)


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 512) for _ in range(n)] for n in lengths]


def assert_same(
    expected: Sequence[Output], actual: Sequence[Output], tolerance: float = 1e-4
) -> None:
    """Tokens identical, every logprob within ``tolerance``."""
    assert len(expected) == len(actual)
    for i, (e, a) in enumerate(zip(expected, actual)):
        assert e.tokens == a.tokens, f"prompt {i}: tokens differ"
        worst = max(abs(x - y) for x, y in zip(e.logprobs, a.logprobs, strict=True))
        assert worst <= tolerance, f"prompt {i}: logprobs differ by {worst}"


def differs(expected: Sequence[Output], actual: Sequence[Output]) -> bool:
    return any(e.tokens != a.tokens for e, a in zip(expected, actual, strict=True))


@contextmanager
def asynchronous_cpu(on: bool = True) -> Iterator[None]:
    """vLLM's CPU platform switches asynchronous scheduling off; the engine runs it."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = vars(platform)["check_and_update_config"]

    def update(cls, vllm_config):
        original.__func__(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    if on:
        platform.check_and_update_config = classmethod(update)
    try:
        yield
    finally:
        platform.check_and_update_config = original


class Models:
    """Tiny models, each made once per test session."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(
        self, kind: str, window: int | tuple[int, int], **overrides: Any
    ) -> Path:
        name = "-".join(
            [kind, str(window), *(f"{k}={v}" for k, v in overrides.items())]
        )
        path = self.root / name.replace(" ", "").replace("/", "_")
        if not path.exists():
            tiny_model(kind, path, window=window, **overrides)
        return path


def tiny_tokenizer(path: Path) -> Path:
    """Save a byte-level tokenizer of 257 ids into a model's directory; returns it."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers import models as tokenizer_models
    from transformers import PreTrainedTokenizerFast

    symbols = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>"
    ).save_pretrained(path)
    return path


@lru_cache(maxsize=4)
def reference(model: Path) -> Any:
    """transformers, eager, float32."""
    return load_reference(model)


def reference_logprobs(model: Path, prompt: Sequence[int], tokens: Sequence[int]):
    """Teacher-forced by transformers.

    Returns:
        Logprobs of ``tokens`` after ``prompt`` and the greedy choice at each of them.
    """
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = reference(model)(ids, use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1].float(), -1)
    chosen = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return chosen.tolist(), logprobs.argmax(-1).tolist()


def assert_equals_reference(
    model: Path,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Output],
    tolerance: float = 1e-3,
) -> None:
    """Every token is transformers' greedy choice, with the same logprob."""
    for prompt, output in zip(prompts, outputs, strict=True):
        logprobs, greedy = reference_logprobs(model, prompt, output.tokens)
        assert list(output.tokens) == greedy
        worst = max(abs(x - y) for x, y in zip(logprobs, output.logprobs, strict=True))
        assert worst <= tolerance, worst


def run_spawned(
    model: str | Path,
    backend: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    **options: Any,
) -> list[Output]:
    """Like :func:`run` with vLLM's defaults: the engine in processes of its own.

    The config crosses process borders before any plugin is loaded there (H1).
    """
    job = dict(
        model=str(model), options=backend | options, prompts=prompts, tokens=max_tokens
    )
    env = {k: v for k, v in os.environ.items() if k not in TEST_ENVIRONMENT}
    result = subprocess.run(
        [sys.executable, "-m", "tests.spawned"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=env | {"VLLM_LOGGING_LEVEL": "INFO"},
        cwd=Path(__file__).parent.parent,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    if backend:
        had_rings.append("ring: on rings: " in result.stdout + result.stderr)
        assert had_rings[-1]
    (line,) = (s for s in result.stdout.splitlines() if s.startswith(ANSWERS))
    answers = json.loads(line.removeprefix(ANSWERS))
    return [Output(tuple(t), tuple(lp), cached) for t, lp, cached in answers]


@contextmanager
def server(model: Path, *options: str, log: Path, env: Mapping[str, str] | None = None):
    """``vllm serve`` with its default multi-process engine; yields its base URL."""
    more_env = env or {}
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if k not in TEST_ENVIRONMENT}
    env |= {"VLLM_LOGGING_LEVEL": "INFO", **more_env}
    command = [Path(sys.executable).parent / "vllm", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *options]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=env
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            with suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            time.sleep(1)
        if "ring" in " ".join(options):
            had_rings.append("ring: on rings: " in log.read_text())
        yield url
    finally:
        process.terminate()
        process.wait(60)


def complete(url: str, api_key: str = "", **body) -> dict:
    """The first choice of ``/v1/completions``, greedy by default."""
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(dict(temperature=0, max_tokens=24, logprobs=1) | body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"},
    )
    return json.load(urllib.request.urlopen(request, timeout=300))["choices"][0]
