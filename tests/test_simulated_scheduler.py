# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler over a checking worker: what no CPU engine can run, and properties.

The worker asserts at every step that each query finds the right content in its window
(see ``simulator``), so a test that only runs to the end has checked every read.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator import VOCAB, Simulator, make_config, make_specs, plan

BS = 4


@pytest.fixture(scope="module")
def model(models):
    return models("gemma3", 64)


def simulate(model, *, windows, num_blocks=400, ring=True, block_size=BS, **options):
    sim_options = {k: options.pop(k) for k in ("num_drafts", "seed") if k in options}
    block_sizes = options.pop("block_sizes", None)
    config = make_config(model, block_size=block_size, **options)
    specs = make_specs(
        config, windows, block_size, ring=ring, block_sizes=block_sizes
    )
    return Simulator(config, plan(config, specs, num_blocks), **sim_options)


def prompts(rng, lengths):
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


workload = st.fixed_dictionaries(
    dict(
        window=st.integers(1, 24),
        layers=st.sampled_from(["S", "SF", "SSF", "ST F".replace(" ", "")]),
        budget=st.integers(3, 60),
        caching=st.booleans(),
        retention=st.sampled_from([0, None, 8]),
        asynchronous=st.booleans(),
        num_blocks=st.integers(60, 400),
        lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6),
        shared=st.integers(0, 60),
        max_tokens=st.integers(1, 40),
        gap=st.integers(0, 4),
        seed=st.integers(0, 2**16),
    )
)


def layer_windows(layers, window):
    return [{"S": window, "T": 2 * window + 3, "F": None}[c] for c in layers]


@settings(max_examples=120, deadline=None)
@given(case=workload)
def test_every_query_reads_what_was_written(model, case):
    """Chunks of any size, mixed steps, sharing, preemption, async: I2 to I9."""
    rng = random.Random(case["seed"])
    sim = simulate(
        model,
        windows=layer_windows(case["layers"], case["window"]),
        num_blocks=case["num_blocks"],
        max_num_batched_tokens=case["budget"],
        max_num_seqs=min(8, case["budget"]),
        max_model_len=192,
        enable_prefix_caching=case["caching"],
        prefix_cache_retention_interval=case["retention"],
        asynchronous=case["asynchronous"],
    )
    head = prompts(rng, [case["shared"]])[0]
    arrivals = [
        (i * case["gap"], head + tail, case["max_tokens"])
        for i, tail in enumerate(prompts(rng, case["lengths"]))
    ]
    outputs = sim.run(arrivals)
    assert all(len(tokens) == case["max_tokens"] for tokens in outputs)
    assert sim.pool.get_num_free_blocks() == sim.num_free_at_start
    assert sim.reads > 0


@settings(max_examples=60, deadline=None)
@given(
    window=st.integers(1, 20),
    drafts=st.integers(1, 5),
    budget=st.integers(8, 40),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
    caching=st.booleans(),
)
def test_rejected_drafts_never_cost_a_window(
    model, window, drafts, budget, lengths, seed, caching
):
    sim = simulate(
        model,
        windows=[window, None],
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        max_model_len=192,
        enable_prefix_caching=caching,
        speculative_config={"method": "ngram", "num_speculative_tokens": drafts,
                            "prompt_lookup_max": 2},
        num_drafts=drafts,
        seed=seed,
    )
    sim.run([(0, p, 40) for p in prompts(random.Random(seed), lengths)])
    assert sim.pool.get_num_free_blocks() == sim.num_free_at_start
