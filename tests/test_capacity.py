# SPDX-License-Identifier: Apache-2.0
"""What vLLM's planner makes of ring specs: never worse than stock (H15, case 18)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

from tests.harness import RING, STOCK, engine, random_prompts
from tests.simulator import make_config, make_specs, plan, smallest_pool

W = 64


@pytest.fixture(scope="module")
def model(models):
    return models("gemma3", W)


def capacities(model, *, windows=(W,) * 5 + (None,), num_blocks=5000, **options):
    """(KV tokens, concurrency, smallest pool) for stock and ring."""
    made = []
    for ring in (False, True):
        config = make_config(model, block_size=32, **options)
        specs = make_specs(config, windows, 32, ring=ring)
        capacity = get_kv_cache_capacity(config, plan(config, specs, num_blocks))
        made.append((*capacity, smallest_pool(config, specs)))
    return made


def assert_no_worse(stock, ring):
    assert ring[0] >= stock[0], "fewer KV tokens"
    assert ring[1] >= stock[1], "lower concurrency"
    assert ring[2] <= stock[2], "needs a larger pool to start"


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no-caching"])
@pytest.mark.parametrize("max_num_seqs", [4, 256])
@pytest.mark.parametrize("max_model_len", [W // 2, W, 2 * W])
def test_case_18_short_contexts_are_never_worse(
    model, max_model_len, max_num_seqs, caching
):
    stock, ring = capacities(
        model,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        enable_prefix_caching=caching,
    )
    assert_no_worse(stock, ring)


@settings(max_examples=100, deadline=None)
@given(
    window=st.integers(1, 600),
    max_model_len=st.integers(16, 4096),
    budget=st.integers(8, 4096),
    caching=st.booleans(),
    asynchronous=st.booleans(),
    layers=st.sampled_from(["S", "SF", "SSSSSF"]),
)
def test_no_configuration_is_worse_than_stock(
    model, window, max_model_len, budget, caching, asynchronous, layers
):
    stock, ring = capacities(
        model,
        windows=[window if c == "S" else None for c in layers],
        max_model_len=max_model_len,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        asynchronous=asynchronous,
    )
    assert_no_worse(stock, ring)


def test_the_bound_is_r_without_caching_and_two_r_with_it(model):
    """Arithmetic: full layers cdiv(len, 32), each of 5 sliding groups R or 2R."""
    for caching, ring_blocks in ((False, 3), (True, 6)):
        (_, _, stock), (_, concurrency, smallest) = capacities(
            model,
            max_model_len=4096,
            max_num_batched_tokens=2048,
            enable_prefix_caching=caching,
        )
        assert smallest == 1 + 4096 // 32 + 5 * ring_blocks
        assert concurrency == 5000 / (4096 // 32 + 5 * ring_blocks)
        assert stock == 1 + 4096 // 32 + 5 * (-(-(W - 1 + 2048) // 32) + 1)


@pytest.mark.engine
def test_the_ring_starts_and_runs_with_the_smallest_pool_of_stock(model):
    options = dict(max_model_len=2 * W, max_num_batched_tokens=512)
    (_, _, smallest), _ = capacities(model, **options)
    for backend in (STOCK, RING):
        with engine(model, backend, num_gpu_blocks_override=smallest, **options) as e:
            assert len(e.run(random_prompts([2 * W - 9]), 8)[0].tokens) == 8
