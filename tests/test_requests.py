# SPDX-License-Identifier: Apache-2.0
"""What a request may ask for and how it may end: each as in stock."""

import json
import re
import shutil
from collections import Counter
from itertools import chain

import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVEventsConfig, PoolerConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.request import RequestStatus
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from tests.harness import (
    RING,
    STOCK,
    Engine,
    Output,
    assert_same,
    engine,
    random_prompts,
    run,
    sampling_params,
    tiny_tokenizer,
    to_output,
)

pytestmark = pytest.mark.engine

W = 64
RING_TOKENS = 96  # R = 3 blocks of 32
CHUNKED = dict(max_num_batched_tokens=100)
TEXT = "a ring of blocks, an index that moves; " * 8  # 5 W tokens of a byte each


@pytest.fixture(scope="module")
def gemma(models):
    return models("gemma3", W)


@pytest.fixture(scope="module")
def with_tokenizer(models, tmp_path_factory):
    """Copies of tiny models that read and write text: windows W and W + 1."""
    copies = []
    for window in (W, W + 1):
        path = tmp_path_factory.mktemp("texts") / "model"
        shutil.copytree(models("gemma3", window), path)
        copies.append(tiny_tokenizer(path))
    return copies


def on_both(model, work, **options):
    """``work(engine)`` in stock and on rings.

    Returns:
        Stock's result and the ring's.
    """
    results = []
    for backend in (STOCK, RING):
        with engine(model, backend, **options) as e:
            assert bool(e.rings) == (backend is RING)
            results.append(work(e))
    return results


def sample_output(done, sample):
    """``to_output`` of one of several samples."""
    logprobs = (lp[t].logprob for t, lp in zip(sample.token_ids, sample.logprobs))
    return Output(tuple(sample.token_ids), tuple(logprobs), done.num_cached_tokens)


# -- what a request asks for -----------------------------------------------------------


@pytest.mark.feature("n > 1", "works")
def test_parallel_sampling_of_several_prompts(gemma):
    prompts = [{"prompt_token_ids": p} for p in random_prompts([20, 3 * W])]
    params = sampling_params(100, n=3, temperature=0.8, seed=7)

    def work(e):
        return [
            [sample_output(done, o) for o in done.outputs]
            for done in e.llm.generate(prompts, params, use_tqdm=False)
        ]

    stock, ring = on_both(gemma, work)
    assert_same(list(chain(*stock)), list(chain(*ring)))
    assert all(len({o.tokens for o in samples}) == 3 for samples in ring)


@pytest.mark.feature("beam search", "works")
def test_beam_search(with_tokenizer):
    """Beams share prefixes, part in mid-ring, and end."""
    params = BeamSearchParams(beam_width=3, max_tokens=64, ignore_eos=True)

    def work(e):
        prompts = [{"prompt": TEXT}, {"prompt": TEXT[:40]}]
        return [
            Output(tuple(beam.tokens), (beam.cum_logprob,), 0)
            for found in e.llm.beam_search(prompts, params)
            for beam in found.sequences
        ]

    options = dict(skip_tokenizer_init=False, **CHUNKED)
    stock, ring = on_both(with_tokenizer[0], work, **options)
    assert len({beam.tokens for beam in ring}) == 6
    assert_same(stock, ring, tolerance=1e-3)  # a sum of 64 logprobs


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["window", "full"]},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 100, "maximum": 999},
            "minItems": 25,
            "maxItems": 25,
        },
    },
    "required": ["kind", "sizes"],
    "additionalProperties": False,
}
CHOICES = ["ring" * 30, "pool" * 30]


def follows_schema(text):
    value = json.loads(text)
    return value["kind"] in ("window", "full") and len(value["sizes"]) == 25


@pytest.mark.feature("structured outputs", "works")
@pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated")
def test_structured_outputs(with_tokenizer):
    """Each answer is longer than the window and obeys; free text does not."""
    wanted = {
        "choice": (dict(choice=CHOICES), CHOICES.__contains__),
        "regex": (dict(regex="[ab]{110}"), re.compile("[ab]{110}").fullmatch),
        "json": (dict(json=SCHEMA), follows_schema),
    }

    def work(e):
        return [
            e.llm.generate(
                [TEXT],
                sampling_params(
                    200 if asked else 20,
                    structured_outputs=asked and StructuredOutputsParams(**asked),
                    ignore_eos=False,
                    detokenize=True,
                ),
                use_tqdm=False,
            )[0]
            for asked in (*(asked for asked, _ in wanted.values()), None)
        ]

    options = dict(
        skip_tokenizer_init=False,
        structured_outputs_config=dict(backend="xgrammar", disable_any_whitespace=True),
        **CHUNKED,
    )
    stock, ring = on_both(with_tokenizer[0], work, **options)
    assert_same([to_output(o) for o in stock], [to_output(o) for o in ring])
    *answers, free = (o.outputs[0] for o in ring)
    for answer, (name, (_, obeys)) in zip(answers, wanted.items()):
        assert len(answer.token_ids) > RING_TOKENS and obeys(answer.text), name
        assert answer.finish_reason == "stop"
    assert not re.fullmatch("[ab]*", free.text)


class NoRepeats(AdapterLogitsProcessor):
    """Forbids the last ``extra_args['no_repeats']`` tokens of the output."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params: SamplingParams):
        span = (params.extra_args or {}).get("no_repeats")
        if span is None:
            return None

        def forbid(output_ids, logits):
            logits[output_ids[-span:]] = -torch.inf
            return logits

        return forbid


@pytest.mark.feature("logits processors", "works")
def test_a_custom_logits_processor(gemma):
    prompts = random_prompts([10, W, 300])
    span = 40

    def work(e):
        return [
            e.run(prompts, num_tokens, extra_args=extra)
            for num_tokens, extra in ((2 * W, dict(no_repeats=span)), (W, None))
        ]

    stock, ring = on_both(gemma, work, logits_processors=[NoRepeats], **CHUNKED)
    for expected, actual in zip(stock, ring):
        assert_same(expected, actual)

    def repeats(output):
        return any(
            t in output.tokens[max(0, i - span) : i]
            for i, t in enumerate(output.tokens)
        )

    assert not any(repeats(o) for o in ring[0])
    assert any(repeats(o) for o in ring[1])


@pytest.mark.feature("causal pooling models", "works")
@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_a_causal_pooling_model(with_tokenizer, task):
    """Vectors of the last token or of every token; a window off by one shows."""
    prompts = [
        {"prompt_token_ids": p} for p in random_prompts([10, W, 100, 300, 5 * W])
    ]

    def work(e):
        done = e.llm.encode(prompts, pooling_task=task, use_tqdm=False)
        return torch.cat([o.outputs.data.reshape(-1, 128) for o in done])

    options = dict(
        runner="pooling",
        pooler_config=PoolerConfig(task=task),
        skip_tokenizer_init=False,
    )
    same, wrong = with_tokenizer
    stock, ring = on_both(same, work, **options, **CHUNKED)
    assert len(stock) == (5 if task == "embed" else 10 + W + 100 + 300 + 5 * W)
    torch.testing.assert_close(ring, stock, atol=1e-4, rtol=0)
    if task == "embed":
        return
    with engine(wrong, RING, **options) as e:
        assert (work(e) - stock).abs().max() > 1e-2


# -- how a request ends ----------------------------------------------------------------


def find(e: Engine, request_id):
    (request,) = (
        r for k, r in e.scheduler.requests.items() if k.startswith(f"{request_id}-")
    )
    return request


def decoded_to(n):
    return (n - 6, lambda r: r.num_computed_tokens == n)


# The victim's prompt and the state in which it is aborted. Beside it a neighbour has
# a long prefill, the first time without prefix hits: then the victim has to wait.
STATES = {
    "waiting": (40, lambda r: r.status == RequestStatus.WAITING),
    "first chunk": (5 * W, lambda r: 0 < r.num_computed_tokens <= W),
    "mid-prefill": (5 * W, lambda r: W < r.num_computed_tokens < 4 * W),
    "last chunk": (5 * W, lambda r: 4 * W <= r.num_computed_tokens < 5 * W),
    **{
        f"decode at {n}": decoded_to(n)
        for n in (W, *range(RING_TOKENS - 1, RING_TOKENS + 2), 128, 193)
    },
}


def abort_when(e, victim, reached):
    """Step until the victim is in that state, then abort it.

    Returns:
        The finished outputs of these steps.
    """
    done = []
    while not reached(find(e, victim)):
        done += e.step()
    e.llm.llm_engine.abort_request([victim])
    return done


@pytest.mark.feature("abort in every state", "works")
def test_abort_in_every_state(gemma):
    """Nothing leaks; a neighbour and a newcomer answer as in stock."""
    neighbour, newcomer = random_prompts([3 * W, 2 * W + 10], seed=1)
    expected = run(gemma, STOCK, [neighbour, newcomer], 12)
    for caching in (True, False):
        options = dict(enable_prefix_caching=caching, max_num_batched_tokens=W)
        with engine(gemma, RING, **options) as e:
            free = e.num_free
            for seed, (name, (length, reached)) in enumerate(STATES.items()):
                e.add(neighbour, sampling_params(12))
                (prompt,) = random_prompts([length], seed=2 + seed)
                victim = e.add(prompt, sampling_params(300))
                done = e.step() + abort_when(e, victim, reached)
                while e.scheduler.requests:
                    done += e.step()
                assert e.num_free == free, name
                assert_same(expected[:1], [to_output(o) for o in done])
                assert_same(expected[1:], e.run([newcomer], 12))


def test_abort_while_preempted(gemma):
    """Two victims; those left answer as in stock, and so do the two when asked anew."""
    prompts = random_prompts([30, 40, 50, 60, 35, 45])
    expected = run(gemma, STOCK, prompts, 64)
    options = dict(max_model_len=192, num_gpu_blocks_override=42)
    for caching in (True, False):
        with engine(gemma, RING, enable_prefix_caching=caching, **options) as e:
            free = e.num_free
            ids = [e.add(p, sampling_params(64)) for p in prompts]
            aborted, done = [], {}
            while e.scheduler.requests:
                done |= {ids.index(o.request_id): to_output(o) for o in e.step()}
                for i, victim in enumerate(ids):
                    if i in done or i in aborted or len(aborted) == 2:
                        continue
                    if find(e, victim).status == RequestStatus.PREEMPTED:
                        aborted.append(i)
                        e.llm.llm_engine.abort_request([victim])
            assert len(aborted) == 2 and not done.keys() & set(aborted)
            assert e.num_free == free
            assert_same(
                [expected[i] for i in sorted(done)], [done[i] for i in sorted(done)]
            )
            again = e.run([prompts[i] for i in aborted], 64)
            assert_same([expected[i] for i in aborted], again)


# -- what happens to an engine in between ----------------------------------------------


@pytest.mark.feature("prefix cache reset, sleep and wake", "works")
def test_what_was_cached_is_gone_after_a_reset_and_a_sleep(gemma):
    """On the CPU sleep unloads nothing, but aborts what runs and drops the cache."""
    prompts = random_prompts([W, 300, 5 * W])

    def work(e):
        free = e.num_free
        outputs = e.run(prompts, 20) + e.run(prompts, 20)
        e.reset_prefix_cache()
        outputs += e.run(prompts, 20)
        e.add(prompts[1], sampling_params(20))
        for _ in range(5):
            e.step()
        e.llm.sleep(level=1)
        assert e.llm.llm_engine.is_sleeping() and e.num_free == free
        e.llm.wake_up()
        assert not e.llm.llm_engine.is_sleeping()
        return outputs + e.run(prompts, 20)

    stock, ring = on_both(gemma, work, **CHUNKED)
    assert_same(stock, ring)
    cached = [[o.cached for o in outputs] for outputs in (stock, ring)]
    assert cached[0] == cached[1]
    cold, warm, after_reset, after_sleep = (cached[1][i : i + 3] for i in (0, 3, 6, 9))
    assert min(warm) > 0 and cold == after_reset == after_sleep == [0] * 3


@pytest.mark.parametrize("backend", [STOCK, RING], ids=["stock", "ring"])
def test_sleep_mode_is_refused_alike(gemma, backend):
    with pytest.raises(ValueError, match="Sleep mode is not supported"):
        with engine(gemma, backend, enable_sleep_mode=True):
            pass


def test_reset_prefix_cache_under_running_requests(gemma):
    """Refused, or it preempts them all: they start again and end the same."""
    prompts = random_prompts([10, W, 300])
    expected = run(gemma, STOCK, prompts, 100)
    with engine(gemma, RING, **CHUNKED) as e:
        free = e.num_free
        running = []
        step = e.step

        def reset_and_step():
            if len(e.steps) in (3, 20, 60, 61, 90):
                assert not e.llm.reset_prefix_cache()
                running.append(len(e.scheduler.running))
                assert e.llm.reset_prefix_cache(reset_running_requests=True)
            return step()

        e.step = reset_and_step
        assert_same(expected, e.run(prompts, 100))
        assert len(running) == 5 and max(running) == 3
        assert e.num_free == free


# -- what an engine tells --------------------------------------------------------------


EVENTS = dict(
    kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
)


def cached_hashes(e):
    """(group, hash) -> number of blocks that hold it, by the pool."""
    found = Counter()
    for key, held in e.pool.cached_block_hash_to_block._cache.items():
        block_hash = maybe_convert_block_hash(get_block_hash(key))
        found[get_group_id(key), block_hash] += len(held) if type(held) is dict else 1
    return found


class Follower:
    """Replays the events of an engine and compares with its pool at each step."""

    def __init__(self, e):
        self.known = Counter()
        self.count = Counter()
        self.kinds = set()
        take_events = e.kv.take_events

        def followed():
            events = take_events()
            for event in events:
                self.replay(event)
            assert self.known == cached_hashes(e)
            return events

        e.kv.take_events = followed

    def replay(self, event):
        self.count[type(event)] += 1
        if isinstance(event, AllBlocksCleared):
            self.known.clear()
            return
        keys = Counter((event.group_idx, h) for h in event.block_hashes)
        if isinstance(event, BlockRemoved):
            assert keys <= self.known
            self.known -= keys
        else:
            assert isinstance(event, BlockStored)
            self.known += keys
            window = event.kv_cache_spec_sliding_window
            self.kinds.add((event.kv_cache_spec_kind, window))


@pytest.fixture(scope="module")
def busy(gemma):
    """Prompts that share and that do not, and what stock answers."""
    shared, *tails = random_prompts([4 * W, 30, W, 90], seed=3)
    prompts = random_prompts([30, 300, 40, 350]) + [shared + t for t in tails]
    return prompts, run(gemma, STOCK, prompts, 40)


@pytest.mark.feature("KV cache events", "works")
@pytest.mark.parametrize("retention", [0, 128])
def test_kv_cache_events_tell_what_the_pool_holds(gemma, busy, retention):
    """At every step of a workload with evictions, preemptions and a reset."""
    options = dict(
        max_model_len=480,
        num_gpu_blocks_override=64,
        prefix_cache_retention_interval=retention,
        **EVENTS,
        **CHUNKED,
    )
    prompts, expected = busy
    with engine(gemma, RING, **options) as e:
        follower = Follower(e)
        for _ in range(2):
            assert_same(expected, e.run(prompts, 40))
        assert follower.count[BlockStored] and follower.count[BlockRemoved]
        assert e.num_preemptions and follower.known
        e.reset_prefix_cache()
        assert_same(expected[:1], e.run(prompts[:1], 40))
        assert follower.count[AllBlocksCleared] == 1
    assert follower.kinds == {("full_attention", None), ("sliding_window", W)}


def test_kv_cache_events_when_the_pool_cannot_spare_what_is_retained(gemma):
    """A block on its way to a later position is not announced under the earlier."""
    prompts = random_prompts([300, 350, 310, 333, 290, 340], seed=5)
    options = dict(
        max_model_len=480,
        num_gpu_blocks_override=64,
        max_num_batched_tokens=170,
        prefix_cache_retention_interval=None,
        **EVENTS,
    )
    with engine(gemma, RING, **options) as e:
        follower = Follower(e)
        e.run(prompts, 10)
        assert follower.count[BlockRemoved]


def test_kv_cache_events_of_an_ample_pool_are_those_of_stock(gemma):
    """With dense retention, where the ring has most to make up for (I9)."""
    shared, *tails = random_prompts([4 * W, 30, W, 90], seed=3)
    prompts = random_prompts([30, W, 5 * W]) + [shared + t for t in tails]
    options = dict(prefix_cache_retention_interval=None, **EVENTS, **CHUNKED)

    def work(e):
        follower = Follower(e)
        for prompt in prompts:
            e.run([prompt], 20)
        assert not follower.count[BlockRemoved]
        return follower.known

    stock, ring = on_both(gemma, work, **options)
    assert ring == stock


def metrics(e):
    """What Prometheus would be told."""
    return {m.name: m.value for m in e.llm.get_metrics() if hasattr(m, "value")}


@pytest.mark.feature("metrics", "works")
def test_metrics_tell_what_the_pool_holds(gemma):
    """Usage is of blocks with an owner; hits are those of stock."""
    shared, *tails = random_prompts([4 * W, 30, W, 90], seed=3)
    prompts = [shared + t for t in tails] + random_prompts([5 * W])

    def work(e):
        usages = []
        make_stats = e.scheduler.make_stats

        def checked(*args, **kwargs):
            stats = make_stats(*args, **kwargs)
            owned = sum(b.ref_cnt > 0 and not b.is_null for b in e.pool.blocks)
            usage = owned / (e.pool.num_gpu_blocks - 1)
            assert stats.kv_cache_usage == pytest.approx(usage, abs=1e-9)
            usages.append(usage)
            return stats

        e.scheduler.make_stats = checked
        outputs = []
        for prompt in [*prompts, prompts[0]]:
            outputs += e.run([prompt], 20)
        e.add(prompts[0], sampling_params(W))
        for _ in range(20):
            e.step()
        assert metrics(e)["vllm:kv_cache_usage_perc"] == pytest.approx(usages[-1])
        assert usages[-1] > 0
        while e.scheduler.requests:
            outputs += [to_output(o) for o in e.step()]
        read = metrics(e)
        hits = sum(o.cached for o in outputs)
        asked = sum(map(len, prompts)) + 2 * len(prompts[0])
        assert read["vllm:kv_cache_usage_perc"] == 0
        assert read["vllm:prefix_cache_hits"] == hits
        assert read["vllm:prefix_cache_queries"] == asked
        return hits, max(usages)

    stock, ring = on_both(gemma, work, disable_log_stats=False, **CHUNKED)
    assert ring[0] == stock[0] > 0
    assert ring[1] < stock[1]
