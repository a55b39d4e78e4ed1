# SPDX-License-Identifier: Apache-2.0
"""Random configurations and workloads, ring against stock: ``make fuzz MINUTES=20``.

A case is a word, ``engine:SEED`` or ``scheduler:SEED``, and reproduces alone::

    python -m tests.fuzz engine:17

``engine`` cases run one tiny model with the same options and the same requests on a
stock and on a ring engine and compare tokens, logprobs, cached tokens and what is free
at the end. ``scheduler`` cases run vLLM's scheduler over the checking worker of
``simulator``, where drafts and several batches in flight are cheap.
"""

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import conftest  # noqa: F401  # one process, many engines
from tests.harness import (
    RING,
    STOCK,
    Engine,
    Models,
    asynchronous_cpu,
    engine,
    sampling_params,
)
from tests.simulator import (
    VOCAB,
    Simulator,
    least_blocks,
    make_config,
    make_specs,
    plan,
    smallest_pool,
)

# Where the two best tokens are as close as rounding, either may win.
TIE = 1e-3
# Rounding that crosses a step of fp8 moves a stored value by 6%.
FP8_TIE = 0.3


# -- engines ---------------------------------------------------------------------------


@dataclass
class Request:
    prompt: list[int]
    max_tokens: int
    arrive: int  # step; in a chat, ignored: one after the other
    abort: int | None  # steps after arrival
    n: int = 1
    priority: int = 0


@dataclass
class EngineCase:
    """Drawn from ``rng``; ``__str__`` is for the report."""

    rng: random.Random
    kind: str = ""
    window: Any = 0
    overrides: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    chat: bool = False
    tight: bool = False
    asynchronous: bool = False

    def __post_init__(self) -> None:
        rng = self.rng
        self.kind = rng.choice(
            ["gemma3", "gemma3", "gemma2", "mistral", "two_windows", "gpt_oss"]
            + ["gemma3n", "gemma4"]
        )
        windows = [8, 31, 32, 48, 64, 95, 96, 127]
        w = rng.choice(windows)
        self.window = (w, rng.choice(windows)) if self.kind == "two_windows" else w
        if self.kind in ("gemma3", "mistral") and rng.random() < 0.3:
            self.overrides["num_key_value_heads"] = rng.choice([1, 4])
        block_size = rng.choice([32, 32, 64])
        budget = max(16, int(rng.choice([0.5, 1, 1.5, 4, 20]) * max(w, 24)) + 1)
        self.options = dict(
            block_size=block_size,
            max_model_len=768,
            max_num_batched_tokens=budget,
            max_num_seqs=min(rng.choice([2, 4, 16]), budget),
            enable_prefix_caching=rng.random() < 0.7,
            prefix_cache_retention_interval=rng.choice([0, 0, None, 2 * block_size]),
            num_gpu_blocks_override=2000,
        )
        if rng.random() < 0.2:
            self.options["long_prefill_token_threshold"] = rng.randrange(8, 64)
        if rng.random() < 0.25:
            self.options["speculative_config"] = dict(
                method="ngram",
                num_speculative_tokens=rng.randrange(1, 6),
                prompt_lookup_max=3,
                prompt_lookup_min=1,
            )
        elif rng.random() < 0.25:
            self.asynchronous = True
        if rng.random() < 0.2:
            self.options["kv_cache_dtype"] = rng.choice(["fp8_e4m3", "fp8_e5m2"])
        if rng.random() < 0.2:
            self.options["scheduling_policy"] = "priority"
        self.chat = self.options["enable_prefix_caching"] and rng.random() < 0.4
        self.tight = not self.chat and rng.random() < 0.4
        self._draw_requests()

    def _draw_requests(self) -> None:
        rng = self.rng
        # top_k with no drafts in a step fails in vLLM 0.32 itself.
        drafting = "speculative_config" in self.options
        head = self._tokens(rng.randrange(0, 300))
        previous: list[int] = []
        for i in range(rng.randrange(2, 5) if self.chat else rng.randrange(2, 9)):
            start = rng.choice([[], head, head, previous])
            prompt = (start + self._tokens(rng.randrange(1, 260)))[:600]
            if rng.random() < 0.3:  # something for ngram drafts
                prompt = (prompt[: rng.randrange(2, 9)] * 300)[: len(prompt)]
            aborted = not self.chat and rng.random() < 0.2
            self.requests.append(
                Request(
                    prompt=prompt,
                    max_tokens=rng.randrange(1, 130),
                    arrive=0 if i == 0 else rng.choice([0, 0, i, 5 * i]),
                    abort=rng.randrange(0, 60) if aborted else None,
                    n=1 if aborted or drafting else rng.choice([1, 1, 3]),
                    priority=rng.randrange(3),
                )
            )
            previous = prompt

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, 512) for _ in range(count)]

    def __str__(self) -> str:
        flags = [name for name in ("chat", "tight", "asynchronous") if vars(self)[name]]
        shape = f"{self.kind} W={self.window} {self.overrides or ''}"
        return f"{shape} {self.options} {flags} {len(self.requests)} requests"


def serve(e: Engine, case: EngineCase) -> list[list[Any] | None]:
    """Run the requests; the completions of each, or None where it was aborted."""
    pending = list(range(len(case.requests)))
    running: dict[str, int] = {}
    aborts: dict[int, list[str]] = {}
    outputs: list[list[Any] | None] = [None] * len(pending)
    step = 0
    while pending or running:
        due = [
            i
            for i in pending
            if (not running if case.chat else case.requests[i].arrive <= step)
        ]
        for i in due[:1] if case.chat else due:
            request = case.requests[i]
            # top_k=1 is greedy and, unlike temperature 0, allows n > 1.
            sampling: dict[str, Any] = {}
            if request.n > 1:
                sampling = dict(n=request.n, temperature=1.0, top_k=1)
            params = sampling_params(request.max_tokens, logprobs=2, **sampling)
            request_id = e.add(
                request.prompt,
                params,
                priority=request.priority
                if case.options.get("scheduling_policy")
                else 0,
            )
            running[request_id] = i
            pending.remove(i)
            if request.abort is not None:
                aborts.setdefault(step + request.abort, []).append(request_id)
        for request_id in aborts.pop(step, ()):
            if request_id in running:
                e.llm.llm_engine.abort_request([request_id])
                del running[request_id]
        for finished in e.step():
            i = running.pop(finished.request_id, None)
            if i is not None:
                outputs[i] = [
                    sorted(finished.outputs, key=lambda o: o.index),
                    finished.num_cached_tokens,
                ]
        step += 1
        assert step < 20_000, "the engine does not finish"
    e.step()  # what was aborted last is freed in the next step
    return outputs


def compare(
    expected: list[list[Any] | None],
    actual: list[list[Any] | None],
    tolerance: float,
) -> None:
    """Tokens and logprobs, up to a tie that rounding may break either way."""
    for i, (stock, ring) in enumerate(zip(expected, actual, strict=True)):
        if stock is None or ring is None:
            continue
        for a, b in zip(stock[0], ring[0], strict=True):
            assert len(a.token_ids) == len(b.token_ids), f"request {i}: lengths"
            for j, (x, y) in enumerate(zip(a.token_ids, b.token_ids)):
                top = {t: p.logprob for t, p in a.logprobs[j].items()}
                if x != y:
                    gap = top[x] - top.get(y, float("-inf"))
                    assert gap <= tolerance, f"request {i}, token {j}: {x} != {y}"
                    break
                off = abs(top[x] - b.logprobs[j][y].logprob)
                assert off <= tolerance, f"request {i}, token {j}: logprob off by {off}"


def run_engine_case(seed: int, models: Models) -> Counter:
    case = EngineCase(random.Random(f"engine:{seed}"))
    model = models(case.kind, case.window, **case.overrides)
    with engine(model, STOCK, **case.options) as e:
        free = e.num_free
        expected = serve(e, case)
        assert e.num_free == free
    options = dict(case.options)
    with asynchronous_cpu(case.asynchronous):
        if case.tight:
            with engine(model, RING, **options) as e:
                groups = e.scheduler.kv_cache_config.kv_cache_groups
                config = e.llm.llm_engine.vllm_config
                least = least_blocks(config, groups)
            options["num_gpu_blocks_override"] = least + case.rng.randrange(12)
        with engine(model, RING, **options) as e:
            assert e.rings
            free = e.num_free
            actual = serve(e, case)
            assert e.num_free == free, f"{free - e.num_free} blocks leaked"
            preemptions = e.num_preemptions
    compare(expected, actual, FP8_TIE if "kv_cache_dtype" in options else TIE)
    if case.chat:
        cached = [[o[1] for o in side if o] for side in (expected, actual)]
        assert cached[0] == cached[1], f"cached tokens: {cached}"
    return Counter(
        engines=1,
        preemptions=preemptions,
        aborted=sum(r.abort is not None for r in case.requests),
        requests=len(case.requests),
    )


# -- the scheduler over a checking worker ----------------------------------------------


def run_scheduler_case(seed: int, models: Models) -> Counter:
    rng = random.Random(f"scheduler:{seed}")
    model = models("gemma3", 64)
    window = rng.randrange(1, 25)
    layers = rng.choice(["S", "SF", "SSF", "STF", "FS"])
    windows = [{"S": window, "T": 2 * window + 3, "F": None}[c] for c in layers]
    drafts = rng.choice([0, 0, 1, 2, 3, 5])
    asynchronous = rng.random() < 0.5
    depth = 0 if asynchronous else rng.choice([1, 1, 2, 3])
    budget = rng.randrange(max(3, 2 * drafts + 2), 60)
    by_model = rng.random() < 0.5
    speculation = None
    if drafts:
        speculation = dict(num_speculative_tokens=drafts)
        if by_model:
            speculation |= dict(method="draft_model", model=str(model))
        else:
            speculation |= dict(method="ngram", prompt_lookup_max=2)
    config = make_config(
        model,
        block_size=4,
        asynchronous=asynchronous,
        max_model_len=192,
        max_num_batched_tokens=budget,
        max_num_seqs=max(1, min(8, budget // (1 + 2 * drafts))),
        enable_prefix_caching=rng.random() < 0.6,
        prefix_cache_retention_interval=rng.choice([0, None, 8]),
        speculative_config=speculation,
    )
    config.parallel_config.pipeline_parallel_size = depth or 1
    specs = make_specs(config, windows, 4)
    num_blocks = smallest_pool(config, specs) + rng.choice([0, 3, 20, 120])
    sim = Simulator(
        config, plan(config, specs, num_blocks), drafts, depth=depth, seed=seed
    )
    head = [rng.randrange(VOCAB) for _ in range(rng.randrange(60))]
    arrivals = [
        (
            rng.choice([0, i, 3 * i]),
            head * (rng.random() < 0.6)
            + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 80))],
            rng.randrange(1, 45),
        )
        for i in range(rng.randrange(1, 8))
    ]
    aborts = {i: rng.randrange(60) for i in range(len(arrivals)) if rng.random() < 0.2}
    outputs = sim.run(arrivals, aborts)
    for i, tokens in enumerate(outputs):
        if i not in aborts:
            assert len(tokens) == arrivals[i][2], f"request {i}: {len(tokens)} tokens"
    leaked = sim.num_free_at_start - sim.pool.get_num_free_blocks()
    assert leaked == 0, f"{leaked} blocks leaked"
    return Counter(
        schedulers=1,
        reads=sim.reads,
        preemptions=sum(len(s.preempted_req_ids or ()) for s in sim.steps),
    )


# -- the command -----------------------------------------------------------------------

RUNNERS = {"engine": run_engine_case, "scheduler": run_scheduler_case}


def run_case(word: str, models: Models) -> Counter:
    """Run ``engine:SEED`` or ``scheduler:SEED``.

    Raises:
        AssertionError: ring and stock differ, or something leaked or starved.
    """
    kind, _, seed = word.partition(":")
    return RUNNERS[kind](int(seed), models)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="engine:SEED or scheduler:SEED")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    args = parser.parse_args()
    failed: list[str] = []
    total: Counter = Counter()
    start = time.monotonic()

    def cases():
        if args.cases:
            yield from args.cases
            return
        seed = args.first
        while time.monotonic() - start < 60 * args.minutes:
            yield f"engine:{seed}"
            yield from (f"scheduler:{20 * seed + i}" for i in range(20))
            seed += 1

    with tempfile.TemporaryDirectory() as root:
        models = Models(Path(root))
        for word in cases():
            try:
                total += run_case(word, models)
            except Exception:
                traceback.print_exc()
                failed.append(word)
                if word.startswith("engine"):
                    seed = word.partition(":")[2]
                    print(EngineCase(random.Random(f"engine:{seed}")), flush=True)
                print(f"REPRODUCE: python -m tests.fuzz {word}", flush=True)
    minutes = (time.monotonic() - start) / 60
    print(f"{minutes:.1f} min, {dict(total)}, failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
