# SPDX-License-Identifier: Apache-2.0
"""Resting requests: the same blocks as when every group is asked; fewer questions."""

import random
import sys

import pytest

from tests.test_simulated_scheduler import BS, busy, prompts, simulate
from vllm_ringwindow.core.manager import Rest, RingBlockManager


@pytest.fixture(scope="module")
def model(models):
    return models("gemma3", 64)


def never_rest(monkeypatch):
    monkeypatch.setattr(RingBlockManager, "rest", lambda self, request_id: None)


def block_ids(sim):
    """What the worker was told, step by step."""
    return [
        (
            [n.block_ids for n in step.scheduled_new_reqs],
            step.scheduled_cached_reqs.new_block_ids,
        )
        for step in sim.steps
    ]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("windows", [[10, None], [10], [10, 23, None]])
def test_the_blocks_are_those_of_rings_that_are_always_asked(
    model, monkeypatch, caching, asynchronous, windows
):
    options = dict(
        windows=windows, enable_prefix_caching=caching, asynchronous=asynchronous
    )
    resting = busy(model, **options)
    assert resting.kv.coordinator._rests == {}  # it lets requests rest
    never_rest(monkeypatch)
    assert block_ids(busy(model, **options)) == block_ids(resting)


def decode(model, tokens=64, **options):
    """Calls of a ring's manager while one request decodes past its window."""
    sim = simulate(model, windows=[10, None], max_num_batched_tokens=64, **options)
    (prompt,) = prompts(random.Random(0), [40])
    calls = []
    (ring,) = sim.rings
    for name in ("remove_skipped_blocks", "allocate_new_blocks", "cache_blocks"):
        method = getattr(ring, name)

        def counted(*args, method=method, name=name, **kwargs):
            calls.append(name)
            return method(*args, **kwargs)

        setattr(ring, name, counted)
    sim.run([(0, prompt, tokens)])
    return calls


@pytest.mark.parametrize("caching", [True, False])
def test_a_full_ring_is_asked_a_few_times_per_block(model, monkeypatch, caching):
    blocks = 64 / BS
    calls = decode(
        model, enable_prefix_caching=caching, prefix_cache_retention_interval=0
    )
    assert len(calls) < 8 * blocks
    never_rest(monkeypatch)
    asked = decode(
        model, enable_prefix_caching=caching, prefix_cache_retention_interval=0
    )
    assert len(asked) > 1.5 * len(calls)


def test_a_ring_that_rests_too_long_is_noticed(model, monkeypatch):
    for_ever = Rest(sys.maxsize, sys.maxsize, sys.maxsize)
    monkeypatch.setattr(RingBlockManager, "rest", lambda self, request_id: for_ever)
    with pytest.raises((AssertionError, IndexError)):
        busy(model)


def test_what_a_finished_request_rested_on_is_forgotten(model):
    sim = busy(model)
    assert sim.kv.coordinator._rests == {}
    assert all(not ring._rings for ring in sim.rings)
