# SPDX-License-Identifier: Apache-2.0
"""Geometry against brute force, and the bounds that make a ring exact.

"Live" positions of a step: every position that some query of the step may read,
up to the newest one that already has a slot, ``q-W+1 .. q+roll_back``.
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from xformers.ops.fmha.attn_bias import (
    BlockDiagonalCausalMask,
    LowerTriangularFromBottomRightMask,
)

from vllm_ringwindow.geometry import (
    chunk_blocks,
    context_blocks,
    fits_in_place,
    ring_blocks,
    slot,
    start_slot,
    visible,
    window_base,
)

BLOCK_SIZES = [1, 2, 3, 4, 7, 8, 16, 32]  # with W in 1..40: W < bs, not a multiple
WINDOWS = range(1, 41)

windows = st.integers(1, 300)
block_sizes = st.integers(1, 64)
positions = st.integers(0, 2000)
few_tokens = st.integers(0, 12)


def live_positions(query: int, window: int, roll_back: int) -> range:
    return range(max(0, query - window + 1), query + roll_back + 1)


def slots_collide(live: range, capacity: int) -> bool:
    """Whether two live positions have the same slot."""
    return len({slot(p, capacity) for p in live}) < len(live)


def blocks_collide(live: range, block_size: int, num_blocks: int) -> bool:
    """Whether two live logical blocks need the same physical block, or have none."""
    logical = {p // block_size for p in live}
    if num_blocks == 0:
        return bool(logical)
    return len({i % num_blocks for i in logical}) < len(logical)


def steady_queries(window: int, period: int) -> range:
    """Queries with a full window, at every alignment to ``period``."""
    return range(window - 1, window - 1 + period)


def blocks_survive(
    num_computed: int, num_allocated: int, window: int, block_size: int, num_blocks: int
) -> bool:
    """Hand out blocks one by one, i in the place of i-R: is all that is read there?"""
    owner = {}
    for i in range(-(-num_allocated // block_size)):
        owner[i % num_blocks] = i
    live = range(max(0, num_computed - window + 1), num_allocated)
    return all(owner[p // block_size % num_blocks] == p // block_size for p in live)


def position_distance_mask(
    q_lens: list[int], k_lens: list[int], window: int
) -> torch.Tensor:
    """Our mask for a batch of sequences, queries at the end of each."""
    masks = []
    for q_len, k_len in zip(q_lens, k_lens):
        query = torch.arange(k_len - q_len, k_len)[:, None]
        masks.append(visible(query, torch.arange(k_len)[None, :], window))
    return torch.block_diag(*masks).bool()


def xformers_local_mask(q_len: int, k_len: int, window: int) -> torch.Tensor:
    bias = LowerTriangularFromBottomRightMask().make_local_attention(window)
    return bias.materialize((q_len, k_len)) == 0


def xformers_batch_mask(
    q_lens: list[int], k_lens: list[int], window: int
) -> torch.Tensor:
    bias = BlockDiagonalCausalMask.from_seqlens(q_lens, k_lens)
    bias = bias.make_local_attention_from_bottomright(window)
    return bias.materialize((sum(q_lens), sum(k_lens))) == 0


# The worked example of the module: W=8, bs=4, R=3, 27 tokens.


def test_worked_example_ring_has_three_blocks():
    assert ring_blocks(8, 4) == 3


def test_worked_example_decode_view_starts_at_block_four():
    assert window_base(26, 8, 4) == 4


def test_worked_example_block_seven_takes_over_when_block_four_is_dead():
    assert window_base(28, 8, 4) == 7 - ring_blocks(8, 4) + 1


# Slots and start.


@given(positions, windows)
@settings(max_examples=100, deadline=None)
def test_capacity_consecutive_positions_have_distinct_slots(first, capacity):
    live = range(first, first + capacity)
    assert sorted(slot(p, capacity) for p in live) == list(range(capacity))


@given(positions, windows)
@settings(max_examples=50, deadline=None)
def test_slot_of_a_tensor_is_slot_of_each_element(first, capacity):
    live = torch.arange(first, first + 20)
    assert slot(live, capacity).tolist() == [slot(p, capacity) for p in live.tolist()]


@pytest.mark.parametrize("num_tokens", [1, 5, 7, 8])
def test_start_is_slot_zero_until_the_window_is_full(num_tokens):
    assert start_slot(num_tokens - 1, window=8, capacity=8) == 0


@pytest.mark.parametrize("num_tokens", [9, 15, 16, 17, 27])
def test_start_after_the_wrap_is_last_position_minus_w_plus_one_mod_w(num_tokens):
    last = num_tokens - 1
    assert start_slot(last, window=8, capacity=8) == (last - 8 + 1) % 8


@given(windows, positions)
@settings(max_examples=100, deadline=None)
def test_start_of_a_full_ring_is_the_slot_the_next_token_overwrites(window, extra):
    last = window - 1 + extra
    assert start_slot(last, window, window) == slot(last + 1, window)


@given(positions, windows, few_tokens)
@settings(max_examples=100, deadline=None)
def test_start_is_the_slot_of_the_oldest_visible_position(last, window, slack):
    capacity = window + slack
    oldest = min(p for p in range(last + 1) if visible(last, p, window))
    assert start_slot(last, window, capacity) == slot(oldest, capacity)


# The decode mask.


@given(positions, windows)
@settings(max_examples=50, deadline=None)
def test_token_at_distance_w_minus_one_is_visible(key, window):
    assert visible(key + window - 1, key, window)


@given(positions, windows)
@settings(max_examples=50, deadline=None)
def test_token_at_distance_w_is_masked(key, window):
    assert not visible(key + window, key, window)


@given(positions, windows)
@settings(max_examples=50, deadline=None)
def test_token_sees_itself(position, window):
    assert visible(position, position, window)


@given(positions, windows)
@settings(max_examples=50, deadline=None)
def test_future_token_is_masked(query, window):
    assert not visible(query, query + 1, window)


@given(st.integers(1, 12), st.integers(0, 30), st.integers(1, 20))
@settings(max_examples=30, deadline=None)
def test_mask_equals_xformers_local_mask(q_len, context, window):
    k_len = context + q_len
    ours = position_distance_mask([q_len], [k_len], window)
    assert torch.equal(ours, xformers_local_mask(q_len, k_len, window))


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 12)), min_size=1, max_size=4),
    st.integers(1, 10),
)
@settings(max_examples=30, deadline=None)
def test_batch_mask_equals_xformers_block_diagonal_local_mask(lens, window):
    q_lens = [q for q, _ in lens]
    k_lens = [q + context for q, context in lens]
    ours = position_distance_mask(q_lens, k_lens, window)
    assert torch.equal(ours, xformers_batch_mask(q_lens, k_lens, window))


@pytest.mark.parametrize("error", [-1, 1])
def test_window_off_by_one_differs_from_xformers_local_mask(error):
    ours = position_distance_mask([5], [20], 8 + error)
    assert not torch.equal(ours, xformers_local_mask(5, 20, 8))


@pytest.mark.parametrize("error", [-1, 1])
def test_window_off_by_one_differs_from_xformers_block_diagonal_mask(error):
    ours = position_distance_mask([2, 5], [12, 20], 8 + error)
    assert not torch.equal(ours, xformers_batch_mask([2, 5], [12, 20], 8))


# Ring blocks: enough, and no fewer would do.


@given(positions, windows, block_sizes, few_tokens, few_tokens)
@settings(max_examples=200, deadline=None)
@example(query=12, window=9, block_size=4, drafts=3, lookahead=0)
@example(query=0, window=1, block_size=64, drafts=0, lookahead=0)
def test_live_positions_never_share_a_slot(
    query, window, block_size, drafts, lookahead
):
    roll_back = drafts + lookahead
    capacity = ring_blocks(window, block_size, roll_back) * block_size
    assert not slots_collide(live_positions(query, window, roll_back), capacity)


@given(positions, windows, block_sizes, few_tokens, few_tokens)
@settings(max_examples=200, deadline=None)
def test_live_logical_blocks_never_share_a_physical_block(
    query, window, block_size, drafts, lookahead
):
    roll_back = drafts + lookahead
    num_blocks = ring_blocks(window, block_size, roll_back)
    live = live_positions(query, window, roll_back)
    assert not blocks_collide(live, block_size, num_blocks)


@pytest.mark.parametrize("roll_back", [0, 1, 3, 7])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_one_block_fewer_shares_a_physical_block_at_some_alignment(
    block_size, roll_back
):
    for window in WINDOWS:
        too_few = ring_blocks(window, block_size, roll_back) - 1
        assert any(
            blocks_collide(live_positions(q, window, roll_back), block_size, too_few)
            for q in steady_queries(window, block_size)
        ), f"{window=}"


@pytest.mark.parametrize("roll_back", [0, 1, 3, 7])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_one_block_fewer_shares_a_slot_iff_the_rest_of_the_span_fills_its_blocks(
    block_size, roll_back
):
    """Slots alone collide at every alignment or at none.

    One block fewer has ``cdiv(W-1+roll_back, bs) * bs`` slots for ``W + roll_back``
    live tokens. Otherwise two live logical blocks share a physical block without
    touching each other's live tokens: no reader could tell, but neither could be
    released or hashed alone, so the block bound is the one that holds.
    """
    for window in WINDOWS:
        too_few = ring_blocks(window, block_size, roll_back) - 1
        queries = steady_queries(window, block_size)
        collides = too_few == 0 or any(
            slots_collide(live_positions(q, window, roll_back), too_few * block_size)
            for q in queries
        )
        assert collides == ((window - 1 + roll_back) % block_size == 0), f"{window=}"


@pytest.mark.parametrize("roll_back", [0, 1, 3, 7])
def test_capacity_one_token_below_the_live_span_collides_at_every_query(roll_back):
    """Case 25: one token short must fail everywhere, not pass by luck."""
    for window in range(2, 41):
        too_small = window + roll_back - 1
        for query in steady_queries(window, 3 * too_small):
            live = live_positions(query, window, roll_back)
            assert slots_collide(live, too_small), f"{window=} {query=}"


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_ring_sized_without_its_drafts_collides(block_size):
    window, drafts = 2 * block_size + 1, 3
    num_blocks = ring_blocks(window, block_size)
    assert any(
        blocks_collide(live_positions(q, window, drafts), block_size, num_blocks)
        for q in steady_queries(window, block_size)
    )


# Which blocks a step touches.


@given(positions, windows, block_sizes)
@settings(max_examples=100, deadline=None)
def test_window_base_is_the_block_of_the_oldest_visible_position(
    query, window, block_size
):
    oldest = next(p for p in range(query + 1) if visible(query, p, window))
    assert window_base(query, window, block_size) == oldest // block_size


@given(st.integers(1, 2000), st.integers(2, 300), block_sizes)
@settings(max_examples=100, deadline=None)
def test_context_blocks_are_those_of_the_visible_computed_tokens(
    num_computed, window, block_size
):
    visible_blocks = {
        p // block_size for p in range(num_computed) if visible(num_computed, p, window)
    }
    assert (
        set(range(*context_blocks(num_computed, window, block_size))) == visible_blocks
    )


@given(windows, block_sizes)
@settings(max_examples=30, deadline=None)
def test_first_chunk_has_no_context_blocks(window, block_size):
    assert not range(*context_blocks(0, window, block_size))


@given(st.integers(1, 2000), block_sizes)
@settings(max_examples=60, deadline=None)
def test_context_of_window_one_is_at_most_the_block_being_filled(
    num_computed, block_size
):
    """No query reads it, but it is the block that copy-out writes as a whole."""
    partial = num_computed % block_size != 0
    expected = [num_computed // block_size] if partial else []
    assert list(range(*context_blocks(num_computed, 1, block_size))) == expected


@given(positions, st.integers(1, 500), block_sizes)
@settings(max_examples=100, deadline=None)
def test_chunk_blocks_are_those_of_the_chunk_tokens(num_computed, length, block_size):
    seq_len = num_computed + length
    touched = {p // block_size for p in range(num_computed, seq_len)}
    assert set(range(*chunk_blocks(num_computed, seq_len, block_size))) == touched


@given(st.integers(1, 2000), st.integers(1, 500), windows, block_sizes)
@settings(max_examples=100, deadline=None)
def test_context_and_chunk_blocks_overlap_only_in_the_block_being_filled(
    num_computed, length, window, block_size
):
    context = set(range(*context_blocks(num_computed, window, block_size)))
    chunk = set(range(*chunk_blocks(num_computed, num_computed + length, block_size)))
    partial = {num_computed // block_size} if num_computed % block_size else set()
    assert context & chunk == partial


# In place or through staging.


@given(
    st.integers(0, 200),
    st.integers(1, 60),
    st.integers(1, 40),
    st.integers(1, 16),
    st.integers(1, 8),
    st.integers(0, 6),
)
@settings(max_examples=400, deadline=None)
def test_fits_in_place_iff_recycling_keeps_every_block_that_is_read(
    num_computed, length, window, block_size, num_blocks, lookahead
):
    seq_len = num_computed + length
    survives = blocks_survive(
        num_computed, seq_len + lookahead, window, block_size, num_blocks
    )
    fits = fits_in_place(
        num_computed, seq_len, window, block_size, num_blocks, lookahead
    )
    assert fits == survives


@given(positions, windows, block_sizes, few_tokens, few_tokens)
@settings(max_examples=200, deadline=None)
def test_decode_with_drafts_and_lookahead_always_fits_in_place(
    num_computed, window, block_size, drafts, lookahead
):
    num_blocks = ring_blocks(window, block_size, drafts + lookahead)
    seq_len = num_computed + 1 + drafts
    assert fits_in_place(
        num_computed, seq_len, window, block_size, num_blocks, lookahead
    )


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_decode_in_one_block_fewer_does_not_fit_at_some_alignment(block_size):
    for window in WINDOWS:
        too_few = ring_blocks(window, block_size) - 1
        assert not all(
            fits_in_place(q, q + 1, window, block_size, too_few)
            for q in steady_queries(window, block_size)
        ), f"{window=}"


@given(windows, block_sizes, st.data())
@settings(max_examples=60, deadline=None)
def test_prompt_no_longer_than_the_ring_fits_in_place(window, block_size, data):
    num_blocks = ring_blocks(window, block_size)
    length = data.draw(st.integers(1, num_blocks * block_size))
    assert fits_in_place(0, length, window, block_size, num_blocks)


@given(windows, block_sizes)
@settings(max_examples=60, deadline=None)
def test_prompt_one_token_longer_than_the_ring_needs_staging(window, block_size):
    num_blocks = ring_blocks(window, block_size)
    too_long = num_blocks * block_size + 1
    assert not fits_in_place(0, too_long, window, block_size, num_blocks)
