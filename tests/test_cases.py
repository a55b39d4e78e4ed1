# SPDX-License-Identifier: Apache-2.0
"""Faults that users of sliding-window caches reported elsewhere, each tried here.

Numbers are those of ``docs/cases.md``. Elsewhere: 7, 8 and 9 in ``test_engine_parity``
(shapes, wrap edges), 14 also in ``test_simulated_scheduler`` (asynchronous scheduling),
25 in ``test_geometry`` and ``test_reference`` (capacity one token short).
"""

import pytest
import torch
from vllm.v1.request import RequestStatus

from tests.harness import (
    RING,
    STOCK,
    assert_equals_reference,
    assert_same,
    asynchronous_cpu,
    engine,
    random_prompts,
    run,
    sampling_params,
)
from vllm_ringwindow.report import blocks_per_request

pytestmark = pytest.mark.engine

W = 64
both_caching = pytest.mark.parametrize(
    "caching", [True, False], ids=["caching", "no-caching"]
)


@pytest.fixture(scope="module")
def gemma(models):
    return models("gemma3", W)


@pytest.fixture(scope="module")
def smallest_pool(gemma):
    """Blocks of the smallest pool that starts (one is the null block)."""
    sizes = {}
    for caching in (True, False):
        with engine(gemma, RING, enable_prefix_caching=caching) as e:
            config = e.llm.llm_engine.vllm_config
            sizes[caching] = 1 + blocks_per_request(config, e.kv.kv_cache_config)[0]
    return sizes


@both_caching
def test_case_1_what_starts_is_admitted(gemma, smallest_pool, caching):
    (prompt,) = random_prompts([2000])
    expected = run(gemma, STOCK, [prompt], 47)
    options = dict(
        enable_prefix_caching=caching, num_gpu_blocks_override=smallest_pool[caching]
    )
    with engine(gemma, RING, max_num_batched_tokens=512, **options) as e:
        for _ in range(2):  # the second time with prefix hits, caching on
            assert_same(expected, e.run([prompt], 47))


def test_case_1_one_block_less_does_not_start(gemma, smallest_pool):
    with pytest.raises(ValueError, match="KV cache"):
        with engine(gemma, RING, num_gpu_blocks_override=smallest_pool[True] - 1):
            pass


@both_caching
def test_case_2_a_tiny_window_reserves_a_ring_not_the_batch(models, caching):
    options = dict(max_num_batched_tokens=2048, enable_prefix_caching=caching)
    with engine(models("gemma3", 16), RING, **options) as e:
        concurrency = e.llm.llm_engine.vllm_config.cache_config.kv_cache_max_concurrency
    full, groups, ring = 2048 // 32, 5, 2 * (2 if caching else 1)
    at_least = 800 / (full + groups * (ring + 1))
    assert at_least <= concurrency <= 800 / (full + groups * 2)


def test_case_3_a_prefix_hit_never_meets_an_empty_ring(gemma):
    (prompt,) = random_prompts([5 * W])
    head, tails = prompt[: 4 * W], random_prompts([W, W], seed=1)
    prompts = [prompt, prompt, head + tails[0], head + tails[1]]
    with engine(gemma, RING) as e:
        cold = []
        for p in prompts:
            e.reset_prefix_cache()
            cold += e.run([p], 48)
        e.reset_prefix_cache()
        warm = [e.run([p], 48)[0] for p in prompts]
    assert [o.cached for o in cold] == [0] * 4
    assert warm[1].cached == 5 * W - 32 and warm[3].cached > 0
    assert_same(cold, warm)


def test_case_4_the_ring_never_overwrites_a_reusable_prefix(gemma):
    (first,) = random_prompts([5 * W])
    second = first[: 4 * W] + random_prompts([W], seed=2)[0]
    with engine(gemma, RING) as e:
        cold = e.run([second], 48)
        e.reset_prefix_cache()
        e.run([first], 3 * W)  # wraps several times after the shared part
        e.run([second], 1)  # detects the shared part and retains its tail
        warm = e.run([first[: 4 * W] + second[4 * W :]], 48)
    assert warm[0].cached > 0
    assert_same(cold, warm)


@pytest.mark.parametrize("retention", [0, 128])
def test_case_5_chats_taking_turns_hit_as_often_as_in_stock(gemma, retention):
    cached = {}
    for name, backend in (("stock", STOCK), ("ring", RING)):
        options = dict(prefix_cache_retention_interval=retention)
        with engine(gemma, backend, **options) as e:
            chats = random_prompts([90, 150, 200, 260])
            cached[name] = []
            for turn in range(3):
                for i, chat in enumerate(chats):
                    (output,) = e.run([chat], 40)
                    cached[name].append(output.cached)
                    question = random_prompts([50], seed=10 * turn + i)[0]
                    chats[i] = chat + list(output.tokens) + question
    assert cached["ring"] == cached["stock"]
    assert min(cached["ring"][4:]) > 0


@both_caching
def test_case_6_parallel_sampling_past_the_window_frees_each_block_once(gemma, caching):
    (prompt,) = random_prompts([3 * W])
    params = sampling_params(80, n=4, temperature=0.9, seed=5)
    answers = []
    for backend in (STOCK, RING):
        with engine(gemma, backend, enable_prefix_caching=caching) as e:
            free = e.num_free
            (done,) = e.llm.generate([{"prompt_token_ids": prompt}], params)
            answers.append([tuple(o.token_ids) for o in done.outputs])
            assert e.num_free == free
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == 4


@pytest.mark.parametrize("budget", [W // 2, W, W + 1, 4 * W])
def test_case_10_chunks_longer_than_the_window(gemma, budget):
    prompts = random_prompts([6 * W])
    ring = run(gemma, RING, prompts, 48, max_num_batched_tokens=budget)
    assert_equals_reference(gemma, prompts, ring)


def test_case_11_newcomers_join_while_others_are_past_the_wrap(gemma):
    prompts = random_prompts([1, 30, W, 2 * W, 3 * W + 5, 4 * W, 5 * W, 6 * W])
    options = dict(enable_prefix_caching=False, max_num_batched_tokens=100)
    with engine(gemma, RING, **options) as e:
        alone = [e.run([p], 120)[0] for p in prompts]
        arrive = [0, 3, 7, 20, 21, 50, 90, 110]
        assert_same(alone, e.run(prompts, 120, arrive=arrive))


@both_caching
def test_case_12_abort_in_mid_prefill_leaks_nothing(gemma, caching):
    long, other = random_prompts([8 * W, 3 * W])
    options = dict(enable_prefix_caching=caching, max_num_batched_tokens=W)
    with engine(gemma, RING, **options) as e:
        expected = e.run([other], 32)
        if caching:
            e.reset_prefix_cache()
        free = e.num_free
        for chunk in range(1, 10):
            request_id = e.add(long, sampling_params(32))
            for _ in range(chunk):
                e.step()
            (internal,) = e.scheduler.requests
            assert internal.startswith(request_id)
            e.scheduler.finish_requests(internal, RequestStatus.FINISHED_ABORTED)
            assert e.num_free == free
            assert_same(expected, e.run([other], 32))


@pytest.mark.feature("preemption, FCFS", "works")
@both_caching
def test_case_13_preempted_requests_resume_on_fresh_blocks(gemma, caching):
    prompts = random_prompts([30, 40, 50, 60, 35, 45])
    expected = run(gemma, STOCK, prompts, 300)
    options = dict(
        enable_prefix_caching=caching,
        max_model_len=480,
        num_gpu_blocks_override=62,
        max_num_batched_tokens=200,
    )
    with engine(gemma, RING, **options) as e:
        free = e.num_free
        assert_same(expected, e.run(prompts, 300))
        assert e.num_preemptions >= 2
        assert e.num_free == free


@pytest.mark.feature("asynchronous scheduling", "works")
def test_case_14_asynchronous_steps_lose_no_block(gemma):
    """The CPU platform switches it off; the engine's own loop runs it all the same."""
    prompts = random_prompts([20 * i + 5 for i in range(1, 17)])
    expected = run(gemma, STOCK, prompts, 60)
    options = dict(max_model_len=400, num_gpu_blocks_override=80)
    with asynchronous_cpu(), engine(gemma, RING, **options) as e:
        assert type(e.scheduler).__name__ == "AsyncScheduler"
        assert_same(expected, e.run(prompts, 60))


def test_case_16_global_layers_keep_all_context_with_the_hybrid_manager_off(gemma):
    prompts = random_prompts([40, 3 * W, 8 * W])
    on = run(gemma, RING, prompts, 64)
    with engine(gemma, RING, disable_hybrid_kv_cache_manager=True) as e:
        assert not e.rings  # promoted to full attention: passed through
        off = e.run(prompts, 64)
    assert_same(on, off)
    assert_equals_reference(gemma, prompts, on)


def test_case_17_nothing_reads_the_null_block(gemma):
    prompts = random_prompts([10, 3 * W, 5 * W])
    expected = run(gemma, STOCK, prompts, 4 * W)
    with engine(gemma, RING) as e:
        config = e.llm.llm_engine.vllm_config.compilation_config
        for layer in config.static_forward_context.values():
            layer.kv_cache[0].fill_(torch.nan)
        outputs = e.run(prompts, 4 * W)
    assert not any(x != x for o in outputs for x in o.logprobs)
    assert_same(expected, outputs)


def test_case_19_a_burst_of_long_prompts_starves_nobody(gemma, smallest_pool):
    prompts = random_prompts([900, 1500, 1900, 1200, 1800, 2000])
    expected = run(gemma, STOCK, prompts, 20)
    options = dict(
        num_gpu_blocks_override=smallest_pool[True] + 10, max_num_batched_tokens=1024
    )
    with engine(gemma, RING, **options) as e:
        assert_same(expected, e.run(prompts, 20))
