# SPDX-License-Identifier: Apache-2.0
"""Prefix reuse on real engines: as many cached tokens as in stock, equal answers.

Chats taking turns are case 5 in ``test_cases``; the property over many workloads is in
``test_simulated_scheduler``.
"""

import pytest

from tests.harness import (
    RING,
    STOCK,
    assert_same,
    engine,
    random_prompts,
    run,
    sampling_params,
)

pytestmark = pytest.mark.engine

W = 64


@pytest.fixture(scope="module")
def gemma(models):
    return models("gemma3", W)


def both(model, prompts, max_tokens=24, **options):
    """Stock's and the ring's outputs for the same batch."""
    outputs = []
    for backend in (STOCK, RING):
        with engine(model, backend, **options) as e:
            outputs.append(e.run(prompts, max_tokens))
    return outputs


@pytest.mark.parametrize("retention", [0, 128, None])
@pytest.mark.parametrize("length", [5 * W, 5 * W + 7, W - 3])
def test_the_same_prompt_twice_in_one_step(gemma, length, retention):
    (prompt,) = random_prompts([length])
    stock, ring = both(
        gemma, [prompt, prompt], prefix_cache_retention_interval=retention
    )
    assert_same(stock, ring)
    assert [o.cached for o in ring] == [o.cached for o in stock]
    assert ring[1].cached == (length - 1) // 32 * 32


@pytest.mark.feature("prefix caching, every retention interval", "works")
@pytest.mark.parametrize("retention", [0, 128, None])
@pytest.mark.parametrize("budget", [2048, 100])
def test_four_prompts_that_share_300_tokens(gemma, retention, budget):
    """One after the other, twice: the junction is found, then hit (I9)."""
    (head,) = random_prompts([300])
    prompts = [head + tail for tail in random_prompts([40, 200, 90, 10], seed=3)]
    options = dict(
        prefix_cache_retention_interval=retention, max_num_batched_tokens=budget
    )
    cached = []
    for backend in (STOCK, RING):
        with engine(gemma, backend, **options) as e:
            outputs = [e.run([p], 8)[0] for p in prompts * 2]
            together = e.run(prompts, 8)
            cached.append([o.cached for o in [*outputs, *together]])
            answers = [*outputs, *together]
        if backend is STOCK:
            expected = answers
    assert_same(expected, answers)
    assert cached[0] == cached[1]
    assert min(cached[1][4:]) >= 288


@pytest.mark.parametrize("retention", [0, 128])
def test_four_prompts_that_share_300_tokens_at_once(gemma, retention):
    (head,) = random_prompts([300])
    prompts = [head + tail for tail in random_prompts([40, 200, 90, 10], seed=3)]
    stock, ring = both(gemma, prompts, prefix_cache_retention_interval=retention)
    assert_same(stock, ring)
    assert [o.cached for o in ring] == [o.cached for o in stock]


def test_a_lent_block_is_not_hashed_when_the_pool_cannot_spare_another(models):
    """Its content is on its way out: a later hit would read what replaced it."""
    model = models("mistral", W)
    prompt, other, tail = random_prompts([410, 10, 20], seed=5)
    again = prompt[:256] + tail
    expected = run(model, STOCK, [again], 24)
    options = dict(
        max_model_len=480,
        max_num_batched_tokens=201,  # chunks of 200 beside one decoding request
        num_gpu_blocks_override=8,  # one block to spare, two to retain
        prefix_cache_retention_interval=128,
    )
    with engine(model, RING, **options) as e:
        e.add(other, sampling_params(20))
        e.step()
        e.add(prompt, sampling_params(2))
        while e.scheduler.requests:
            e.step()
        assert_same(expected, e.run([again], 24))
