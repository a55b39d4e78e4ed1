# SPDX-License-Identifier: Apache-2.0
"""Ring engines against stock engines and transformers: same tokens, same logprobs."""

import pytest

from tests.harness import (
    RING,
    STOCK,
    assert_equals_reference,
    assert_same,
    engine,
    random_prompts,
    run,
)

pytestmark = pytest.mark.engine

W = 64
LENGTHS = [10, 31, W - 1, W, W + 1, 96, 97, 130, 200, 256, 333, 6 * W]


@pytest.fixture(scope="module")
def stock(models):
    """Stock's answers, one engine per (kind, window)."""
    answers = {}

    def get(kind, window, lengths, max_tokens):
        key = (kind, window, tuple(lengths), max_tokens)
        if key not in answers:
            answers[key] = run(
                models(kind, window), STOCK, random_prompts(lengths), max_tokens
            )
        return answers[key]

    return get


@pytest.mark.feature("chunked prefill, chunks longer than the window", "works")
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no-caching"])
@pytest.mark.parametrize("budget", [W // 2, W + 1, 4 * W])
def test_twelve_prompts_equal_stock_at_every_chunk_size(models, stock, budget, caching):
    ring = run(
        models("gemma3", W),
        RING,
        random_prompts(LENGTHS),
        200,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    assert_same(stock("gemma3", W, LENGTHS, 200), ring)


SHAPES = {
    "all layers sliding": ("mistral", 64),
    "two windows": ("two_windows", (48, 160)),
    "W not a multiple of the block": ("gemma3", 3 * 32 - 1),
    "W = 31": ("gemma3", 31),
    "W smaller than a block": ("gemma3", 8),
    "soft-caps": ("gemma2", 64),
    "sinks": ("gpt_oss", 64),
}


@pytest.mark.feature("sinks, soft-caps, several windows in one model, any W", "works")
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no-caching"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_equals_stock_and_transformers(models, stock, shape, caching):
    kind, window = SHAPES[shape]
    widest = window if isinstance(window, int) else max(window)
    lengths = [5, widest, widest + 1, 2 * widest + 7, 6 * widest]
    prompts = random_prompts(lengths)
    ring = run(
        models(kind, window),
        RING,
        prompts,
        64,
        max_num_batched_tokens=widest + 3,
        max_num_seqs=8,
        enable_prefix_caching=caching,
    )
    assert_same(stock(kind, window, lengths, 64), ring)
    assert_equals_reference(models(kind, window), prompts, ring)


@pytest.mark.feature("prompt logprobs", "works")
def test_prompt_logprobs_equal_stock(models):
    prompts = random_prompts([40, W, 5 * W])
    outputs = []
    for backend in (STOCK, RING):
        with engine(models("gemma3", W), backend, max_num_batched_tokens=96) as e:
            outputs.append(e.run(prompts, 4, prompt_logprobs=1))
    for stock_output, ring_output in zip(*outputs):
        assert len(ring_output.prompt_logprobs) > 0
        assert ring_output.prompt_logprobs == pytest.approx(
            stock_output.prompt_logprobs, abs=1e-4
        )


def test_batch_of_one_equals_batch_of_eight_with_uneven_lengths(models):
    prompts = random_prompts([7, 40, W, W + 1, 2 * W, 199, 300, 6 * W])
    with engine(models("gemma3", W), RING, enable_prefix_caching=False) as e:
        together = e.run(prompts, 48)
        alone = [e.run([prompt], 48)[0] for prompt in prompts]
    assert_same(alone, together)


@pytest.mark.parametrize("length", [W - 1, W, W + 1, 95, 96, 97])
def test_wrap_edges_equal_transformers_at_every_token(models, length):
    """Case 9: prompts around W and around R * block_size (R = 3)."""
    prompts = random_prompts([length])
    ring = run(models("gemma3", W), RING, prompts, 2 * W)
    assert_equals_reference(models("gemma3", W), prompts, ring)


def test_switching_the_backend_off_restores_stock_exactly(models):
    """In the process that just ran rings: same bits, no ring manager left."""
    prompts = random_prompts([30, 3 * W, 6 * W])
    before = run(models("gemma3", W), STOCK, prompts, 32)
    run(models("gemma3", W), RING, prompts, 32)
    assert run(models("gemma3", W), STOCK, prompts, 32) == before


@pytest.mark.feature("seeded sampling", "works")
def test_float32_sampling_with_seed_equals_stock(models):
    prompts = random_prompts([30, 3 * W, 6 * W])
    outputs = []
    for backend in (STOCK, RING):
        with engine(models("gemma3", W), backend) as e:
            outputs.append(e.run(prompts, 64, temperature=0.8, seed=1234))
    assert_same(*outputs)
