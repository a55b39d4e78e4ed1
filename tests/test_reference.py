# SPDX-License-Identifier: Apache-2.0
"""The reference ring against the whole history, and faults that must show.

``History`` keeps every token; a window is a slice of it. ``check_like_history`` is
the property; the negatives run the same property on rings broken on purpose.
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.masking_utils import sliding_window_overlay

from vllm_ringwindow import reference
from vllm_ringwindow.geometry import ring_blocks, visible
from vllm_ringwindow.reference import Entries, RingKV, ShiftKV, attend

H, D = 2, 4  # KV heads, head size
SCALE = 2.0  # peaky attention: one key more or less changes the output

windows = st.integers(1, 12)
slacks = st.integers(0, 6)
ops = st.lists(
    st.tuples(st.sampled_from(["push", "prefill", "roll_back"]), st.integers(0, 30)),
    max_size=14,
)


class History:
    """Every token ever kept; ``lowest`` is the oldest one a bounded cache holds."""

    def __init__(self, window, capacity):
        self.window, self.capacity = window, capacity
        self.k, self.v = torch.zeros(0, H, D), torch.zeros(0, H, D)
        self.lowest = 0

    def __len__(self):
        return len(self.k)

    def push(self, k, v):
        self.k, self.v = torch.cat([self.k, k]), torch.cat([self.v, v])
        self.lowest = max(self.lowest, len(self) - self.capacity)

    def room(self):
        """How many tokens can be rolled back with the last window still whole."""
        held = len(self) - self.lowest
        return held if self.lowest == 0 else held - self.window

    def roll_back(self, n):
        self.k, self.v = self.k[: len(self) - n], self.v[: len(self) - n]

    def slice(self, first, stop):
        return Entries(
            torch.arange(first, stop), self.k[first:stop], self.v[first:stop]
        )

    def read(self, current_pos, window):
        return self.slice(max(0, current_pos - window + 1), current_pos + 1)


def chunk(n, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, n, H, D, generator=generator, dtype=dtype)
    return k, v


def queries(n, num_heads=2 * H):
    generator = torch.Generator().manual_seed(10**6)
    return torch.randn(n, num_heads, D, generator=generator, dtype=torch.float64)


def assert_same(got, expected):
    for name, a, b in zip(Entries._fields, got, expected):
        assert torch.equal(a, b), name


def assert_reads_like(cache, history):
    """Every query that may still run reads the same window as in the history."""
    last = len(history) - 1
    for back in range(min(len(history), history.room() + 1)):
        expected = history.read(last - back, cache.window)
        assert_same(cache.read(last - back, cache.window), expected)


def check_like_history(cache, steps, capacity=None):
    """The property: after any steps, ``cache`` reads what the history says.

    Roll-backs are clipped to the slack that ``capacity`` tokens (default: those of
    ``cache``) allow. Returns the history.
    """
    history = History(cache.window, capacity or cache.capacity)
    for seed, (op, n) in enumerate(steps):
        if op == "roll_back":
            n = min(n, history.room())
            cache.roll_back(n)
            history.roll_back(n)
        else:
            k, v = chunk(n, seed)
            first = max(0, len(history) - cache.window + 1)
            history.push(k, v)
            if op == "prefill":
                staged = cache.prefill(k, v)
                assert_same(staged, history.slice(first, len(history)))
            else:
                cache.push(k, v)
        assert_reads_like(cache, history)
    return history


def filled(window, num_tokens, cls=RingKV, **kwargs):
    cache = cls(window, H, D, **kwargs)
    cache.push(*chunk(num_tokens))
    return cache


# Reads equal the naive window.


@given(windows, slacks, ops)
@settings(max_examples=120, deadline=None)
@example(window=8, slack=0, steps=[("prefill", 7), ("push", 1), ("push", 1)])
@example(window=8, slack=4, steps=[("prefill", 30), ("push", 4), ("roll_back", 4)])
def test_ring_reads_the_naive_window_after_any_steps(window, slack, steps):
    check_like_history(RingKV(window, H, D, capacity=window + slack), steps)


@given(windows, slacks, ops)
@settings(max_examples=60, deadline=None)
def test_shifted_array_reads_the_naive_window_after_any_steps(window, slack, steps):
    pushes = [("push" if op == "prefill" else op, n) for op, n in steps]
    check_like_history(ShiftKV(window, H, D, slack=slack), pushes)


@given(windows, st.integers(1, 8), st.integers(0, 4), ops)
@settings(max_examples=60, deadline=None)
def test_ring_of_whole_blocks_reads_the_naive_window(window, bs, drafts, steps):
    capacity = ring_blocks(window, bs, drafts) * bs
    check_like_history(RingKV(window, H, D, capacity=capacity), steps)


@given(windows, slacks, ops)
@settings(max_examples=60, deadline=None)
def test_occupied_slots_hold_their_own_position(window, slack, steps):
    ring = RingKV(window, H, D, capacity=window + slack)
    check_like_history(ring, steps)
    occupied = ring.positions >= 0
    slots = torch.arange(ring.capacity)[occupied]
    assert torch.equal(ring.positions[occupied] % ring.capacity, slots)


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 100])
def test_one_chunk_leaves_the_ring_as_single_tokens_do(num_tokens):
    k, v = chunk(num_tokens)
    one_by_one = RingKV(8, H, D, capacity=10)
    for i in range(num_tokens):
        one_by_one.push(k[i : i + 1], v[i : i + 1])
    at_once = filled(8, num_tokens, capacity=10)
    assert torch.equal(at_once.k, one_by_one.k)


def test_memory_does_not_grow_with_length():
    ring = filled(8, 8)
    before = ring.k.data_ptr(), ring.k.shape, ring.positions.shape
    for seed in range(50):
        ring.push(*chunk(3, seed))
    assert (ring.k.data_ptr(), ring.k.shape, ring.positions.shape) == before


def test_push_writes_no_slot_but_its_own():
    ring = filled(8, 20)
    before = ring.k.clone()
    ring.push(*chunk(1, seed=1))
    changed = (ring.k != before).any(-1).any(-1)
    assert changed.nonzero().flatten().tolist() == [20 % 8]


def test_two_rings_share_nothing():
    one, other = filled(8, 20), filled(8, 3)
    before = other.k.clone(), other.v.clone(), other.positions.clone(), other.start
    one.push(*chunk(5, seed=1))
    after = other.k, other.v, other.positions
    assert all(torch.equal(a, b) for a, b in zip(after, before))
    assert other.start == before[3]


@given(st.lists(st.integers(1, 20), min_size=8, max_size=8))
@settings(max_examples=20, deadline=None)
def test_uneven_batch_of_eight_reads_as_eight_solo_runs(lengths):
    rings = [RingKV(6, H, D) for _ in lengths]
    histories = [History(6, 6) for _ in lengths]
    for step in range(max(lengths)):
        for i, length in enumerate(lengths):
            if step < length:
                k, v = chunk(1, seed=100 * i + step)
                rings[i].push(k, v)
                histories[i].push(k, v)
    for ring, history in zip(rings, histories):
        assert_reads_like(ring, history)


# Start.


@pytest.mark.parametrize("num_tokens", [1, 7, 8])
def test_start_after_a_prefill_up_to_w_is_slot_zero(num_tokens):
    assert filled(8, num_tokens).start == 0


@pytest.mark.parametrize("num_tokens", [9, 15, 16, 17, 83])
def test_start_after_a_prefill_longer_than_w_follows_the_wrap(num_tokens):
    assert filled(8, num_tokens).start == (num_tokens - 1 - 8 + 1) % 8


def test_start_of_an_empty_ring_is_slot_zero():
    assert RingKV(8, H, D).start == 0


@pytest.mark.parametrize("num_tokens", [5, 8, 30])
@pytest.mark.parametrize("capacity", [8, 11])
def test_start_holds_the_oldest_position_in_the_window(num_tokens, capacity):
    ring = filled(8, num_tokens, capacity=capacity)
    assert ring.positions[ring.start] == max(0, num_tokens - 8)


@pytest.mark.parametrize("num_tokens", [7, 8, 9, 30])
def test_first_decode_after_prefill_reads_the_naive_window(num_tokens):
    check_like_history(RingKV(8, H, D), [("prefill", num_tokens), ("push", 1)])


# The decode mask.


@given(windows, slacks, ops)
@settings(max_examples=60, deadline=None)
def test_decode_mask_shows_exactly_the_positions_that_read_returns(
    window, slack, steps
):
    ring = RingKV(window, H, D, capacity=window + slack)
    check_like_history(ring, [("push", 1), *steps, ("push", 1)])
    last = ring.num_tokens - 1
    shown = ring.positions[ring.decode_mask(last, window)]
    assert torch.equal(shown.sort().values, ring.read(last, window).positions)


def test_decode_mask_hides_empty_slots():
    assert filled(8, 3).decode_mask(2, 8).sum() == 3


def test_decode_mask_hides_stale_slots():
    ring = filled(8, 30, capacity=12)
    hidden = ring.positions[~ring.decode_mask(29, 8)]
    assert sorted(hidden.tolist()) == [18, 19, 20, 21]


def test_decode_mask_shows_distance_w_minus_one():
    ring = filled(8, 30, capacity=12)
    assert ring.decode_mask(29, 8)[(29 - 7) % 12]


def test_decode_mask_hides_distance_w():
    ring = filled(8, 30, capacity=12)
    assert not ring.decode_mask(29, 8)[(29 - 8) % 12]


def test_decode_mask_hides_newer_tokens_from_an_older_query():
    ring = filled(8, 30, capacity=12)
    assert not ring.decode_mask(27, 8)[[28 % 12, 29 % 12]].any()


def test_decode_mask_hides_tokens_that_were_rolled_back():
    ring = filled(8, 30, capacity=12)
    ring.roll_back(3)
    assert ring.positions[ring.decode_mask(29, 8)].max() == 26


# Roll-back.


@given(windows, slacks, ops)
@settings(max_examples=60, deadline=None)
def test_roll_back_one_token_past_the_slack_is_refused(window, slack, steps):
    ring = RingKV(window, H, D, capacity=window + slack)
    wrapped = [("push", window + slack + 1), *steps]
    history = check_like_history(ring, wrapped)
    with pytest.raises(ValueError, match="has overwritten"):
        ring.roll_back(history.room() + 1)


def test_roll_back_of_a_full_ring_reaches_capacity_minus_window():
    ring = filled(8, 30, capacity=12)
    ring.roll_back(4)
    assert ring.read(25, 8).positions.tolist() == list(range(18, 26))


def test_refused_roll_back_changes_nothing():
    ring = filled(8, 30, capacity=12)
    before = ring.positions.clone()
    with pytest.raises(ValueError, match="n=5"):
        ring.roll_back(5)
    assert torch.equal(ring.positions, before)


def test_roll_back_before_the_wrap_may_forget_all():
    ring = filled(8, 8)
    ring.roll_back(8)
    assert ring.num_tokens == 0


@pytest.mark.parametrize("n", [-1, 31])
def test_roll_back_of_an_impossible_count_is_refused(n):
    with pytest.raises(ValueError, match=f"got {n}"):
        filled(8, 30).roll_back(n)


@pytest.mark.parametrize("n", [5, 29])
def test_shifted_array_refuses_the_roll_backs_that_the_ring_refuses(n):
    with pytest.raises(ValueError, match=f"n={n}"):
        filled(8, 30, ShiftKV, slack=4).roll_back(n)


def test_roll_back_of_everything_empties_a_wrapped_ring():
    ring = filled(8, 30)
    ring.roll_back(30)
    assert (ring.num_tokens, ring.positions.tolist()) == (0, [-1] * 8)


# Attention in float64: ring = naive window = full attention with a sliding mask.


def hf_attention(q, k, v, window):
    """Attention over the whole history with the mask that transformers builds."""
    q_idx = torch.arange(len(k) - len(q), len(k))[:, None]
    kv_idx = torch.arange(len(k))[None, :]
    in_window = sliding_window_overlay(window)(0, 0, q_idx, kv_idx)
    return attend(q, k, v, SCALE, mask=in_window & (kv_idx <= q_idx))


def decode_on_slots(ring, q, window):
    """Attention of the newest token over the slots as they lie, nothing moved."""
    mask = ring.decode_mask(ring.num_tokens - 1, window)
    return attend(q, ring.k, ring.v, SCALE, mask=mask)


def decoding(window, num_tokens, capacity=None):
    """A ring after ``num_tokens`` tokens, the K/V pushed, one query."""
    k, v = chunk(num_tokens, dtype=torch.float64)
    ring = RingKV(window, H, D, capacity=capacity, dtype=torch.float64)
    ring.push(k, v)
    return ring, k, v, queries(1)


def close(a, b):
    return torch.allclose(a, b, rtol=0, atol=1e-12)


def clearly_different(a, b):
    return (a - b).abs().max() > 1e-3


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 11, 12, 13, 40])
def test_ring_decode_equals_naive_window_attention(num_tokens):
    ring, k, v, q = decoding(8, num_tokens, capacity=11)
    assert close(decode_on_slots(ring, q, 8), attend(q, k[-8:], v[-8:], SCALE))


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 11, 12, 13, 40])
def test_ring_decode_equals_full_attention_with_a_sliding_mask(num_tokens):
    ring, k, v, q = decoding(8, num_tokens, capacity=11)
    assert close(decode_on_slots(ring, q, 8), hf_attention(q, k, v, 8))


@pytest.mark.parametrize("num_tokens", [7, 8, 9, 40])
def test_attention_on_read_equals_attention_on_slots(num_tokens):
    ring, _, _, q = decoding(8, num_tokens)
    entries = ring.read(num_tokens - 1, 8)
    on_read = attend(q, entries.k, entries.v, SCALE)
    assert close(on_read, decode_on_slots(ring, q, 8))


@pytest.mark.parametrize("context", [0, 3, 7, 8, 30])
@pytest.mark.parametrize("length", [1, 5, 8, 9, 33])
def test_staged_prefill_equals_full_attention_with_a_sliding_mask(context, length):
    k, v = chunk(context + length, dtype=torch.float64)
    ring = RingKV(8, H, D, dtype=torch.float64)
    ring.push(k[:context], v[:context])
    staged = ring.prefill(k[context:], v[context:])
    q_pos = torch.arange(context, context + length)[:, None]
    mask = visible(q_pos, staged.positions[None, :], 8)
    got = attend(queries(length), staged.k, staged.v, SCALE, mask=mask)
    assert close(got, hf_attention(queries(length), k, v, 8))


@pytest.mark.parametrize("rejected", [1, 2, 3])
def test_decode_after_rejected_drafts_equals_a_run_without_them(rejected):
    window, drafts = 8, 3
    k, v = chunk(21, dtype=torch.float64)
    ring = RingKV(window, H, D, capacity=window + drafts, dtype=torch.float64)
    ring.push(k[:20], v[:20])
    ring.push(*chunk(rejected, seed=9, dtype=torch.float64))
    ring.roll_back(rejected)
    ring.push(k[20:], v[20:])
    q = queries(1)
    assert close(decode_on_slots(ring, q, window), hf_attention(q, k, v, window))


@pytest.mark.parametrize("num_heads", [H, 2 * H, 4 * H])
def test_attend_equals_torch_grouped_query_attention(num_heads):
    k, v = chunk(9, dtype=torch.float64)
    q = queries(5, num_heads)
    mask = torch.ones(5, 9).tril(4).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        attn_mask=mask,
        scale=SCALE,
        enable_gqa=True,
    )
    assert close(attend(q, k, v, SCALE, mask=mask), expected[0].transpose(0, 1))


def test_attend_computes_in_the_given_dtype():
    k, v = chunk(9)
    assert attend(queries(1), k, v, SCALE, dtype=torch.float32).dtype == torch.float32


# Faults that must show. Each breaks one thing and fails what passes above.


@pytest.mark.parametrize("error", [-1, 1])
def test_window_off_by_one_changes_the_attention_output(error):
    ring, k, v, q = decoding(8, 40, capacity=11)
    wrong = decode_on_slots(ring, q, 8 + error)
    assert clearly_different(wrong, hf_attention(q, k, v, 8))


@pytest.mark.parametrize("error", [-1, 1])
def test_window_off_by_one_fails_the_property(error):
    class OffByOne(RingKV):
        def read(self, current_pos, window):
            return super().read(current_pos, window + error)

    ring = OffByOne(8, H, D, capacity=12)
    with pytest.raises(AssertionError, match="positions"):
        check_like_history(ring, [("push", 5), ("push", 5)])


def test_stale_slots_left_visible_change_the_attention_output():
    ring, k, v, q = decoding(8, 40, capacity=11)
    assert clearly_different(attend(q, ring.k, ring.v, SCALE), hf_attention(q, k, v, 8))


@pytest.mark.parametrize("drafts", [1, 2, 3, 5])
@pytest.mark.parametrize("window", [1, 2, 7, 8, 12])
def test_capacity_one_token_below_need_fails_the_property(window, drafts):
    """Case 25: one token short must not pass by luck."""
    need = window + drafts
    steps = [("push", need + 1), ("roll_back", drafts), ("push", 1)]
    check_like_history(RingKV(window, H, D, capacity=need), steps)
    with pytest.raises(ValueError, match="overwritten"):
        short = RingKV(window, H, D, capacity=need - 1)
        check_like_history(short, steps, capacity=need)


def test_capacity_one_token_below_the_window_changes_the_attention_output():
    ring, k, v, q = decoding(7, 40)
    assert clearly_different(decode_on_slots(ring, q, 8), hf_attention(q, k, v, 8))


@pytest.mark.parametrize("window_bs", [(9, 4), (33, 32), (5, 2)])
def test_ring_one_block_short_of_the_window_is_refused(window_bs):
    window, bs = window_bs
    with pytest.raises(ValueError, match="capacity"):
        RingKV(window, H, D, capacity=(ring_blocks(window, bs) - 1) * bs)


@pytest.mark.parametrize("drafts", [1, 5])
def test_ring_one_block_short_of_its_drafts_fails_the_property(drafts):
    window, bs = 8, 4  # (window - 1 + drafts) fills its blocks: slots collide
    enough = ring_blocks(window, bs, drafts) * bs
    steps = [("push", 30), ("push", drafts), ("roll_back", drafts)]
    check_like_history(RingKV(window, H, D, capacity=enough), steps)
    with pytest.raises(ValueError, match="overwritten"):
        short = RingKV(window, H, D, capacity=enough - bs)
        check_like_history(short, steps, capacity=enough)


def test_newest_first_read_fails_the_property():
    class NewestFirst(RingKV):
        def read(self, current_pos, window):
            return Entries(*(x.flip(0) for x in super().read(current_pos, window)))

    with pytest.raises(AssertionError, match="positions"):
        check_like_history(NewestFirst(8, H, D), [("push", 3)])


def test_chunk_copied_out_newest_first_fails_the_property():
    class NewestFirst(RingKV):
        def push(self, k, v):
            super().push(k.flip(0), v.flip(0))

    with pytest.raises(AssertionError, match=r"^k\b"):
        check_like_history(NewestFirst(8, H, D), [("push", 3)])


def test_slots_returned_as_positions_fail_the_property_after_the_wrap():
    class SlotAsPosition(RingKV):
        def read(self, current_pos, window):
            positions, k, v = super().read(current_pos, window)
            return Entries(positions % self.capacity, k, v)

    check_like_history(SlotAsPosition(8, H, D), [("push", 8)])
    with pytest.raises(AssertionError, match="positions"):
        check_like_history(SlotAsPosition(8, H, D), [("push", 8), ("push", 1)])


def test_start_left_at_zero_after_a_wrapping_prefill_is_reported(monkeypatch):
    ring = filled(8, 13)
    monkeypatch.setattr(reference, "start_slot", lambda *_: 0)
    with pytest.raises(ValueError, match="overwritten"):
        ring.read(12, 8)


def test_start_left_at_zero_without_the_position_check_reads_stale_slots():
    ring, k, v, q = decoding(8, 40, capacity=11)
    assert ring.start != 0
    wrong = attend(q, ring.k[:8], ring.v[:8], SCALE)
    assert clearly_different(wrong, hf_attention(q, k, v, 8))


def test_ring_shared_by_two_sequences_fails_both():
    shared = RingKV(8, H, D)
    histories = [History(8, 8), History(8, 8)]
    for seed, history in enumerate(histories):
        k, v = chunk(5, seed)
        shared.push(k, v)
        history.push(k, v)
    for history, last in zip(histories, (4, 9)):
        with pytest.raises((AssertionError, ValueError)):
            assert_same(shared.read(last, 8), history.read(4, 8))


# Errors name the argument and the value.


@pytest.mark.parametrize("cls", [RingKV, ShiftKV])
def test_window_below_one_is_refused(cls):
    with pytest.raises(ValueError, match="window .* got 0"):
        cls(0, H, D)


def test_capacity_below_the_window_is_refused():
    with pytest.raises(ValueError, match="capacity .* got 7"):
        RingKV(8, H, D, capacity=7)


def test_negative_slack_is_refused():
    with pytest.raises(ValueError, match="slack .* got -1"):
        ShiftKV(8, H, D, slack=-1)


@pytest.mark.parametrize("cls", [RingKV, ShiftKV])
def test_overwritten_position_is_refused(cls):
    with pytest.raises(ValueError, match="current_pos=28"):
        filled(8, 30, cls).read(28, 8)


@pytest.mark.parametrize("cls", [RingKV, ShiftKV])
def test_position_not_yet_written_is_refused(cls):
    with pytest.raises(ValueError, match="current_pos=30"):
        filled(8, 30, cls).read(30, 8)


@pytest.mark.parametrize("cls", [RingKV, ShiftKV])
def test_window_wider_than_the_cache_is_refused(cls):
    with pytest.raises(ValueError, match="window=9"):
        filled(8, 30, cls).read(29, 9)


def test_early_query_of_a_chunk_longer_than_the_ring_needs_prefill():
    ring = RingKV(8, H, D)
    ring.push(*chunk(20))
    with pytest.raises(ValueError, match="current_pos=3"):
        ring.read(3, 8)


@pytest.mark.parametrize("cls", [RingKV, ShiftKV])
def test_negative_current_pos_is_refused(cls):
    with pytest.raises(ValueError, match="current_pos .* got -1"):
        filled(8, 3, cls).read(-1, 8)


@pytest.mark.parametrize("cls", [RingKV, ShiftKV])
def test_read_window_below_one_is_refused(cls):
    with pytest.raises(ValueError, match="window .* got 0"):
        filled(8, 3, cls).read(2, 0)


@pytest.mark.parametrize("cls", [RingKV, ShiftKV])
def test_k_with_the_wrong_number_of_heads_is_refused(cls):
    wrong = torch.zeros(3, H + 1, D)
    with pytest.raises(ValueError, match="k must be"):
        cls(8, H, D).push(wrong, wrong)


@pytest.mark.parametrize("cls", [RingKV, ShiftKV])
def test_v_shorter_than_k_is_refused(cls):
    k, v = chunk(3)
    with pytest.raises(ValueError, match="v must be"):
        cls(8, H, D).push(k, v[:2])


def test_attend_refuses_query_heads_that_kv_heads_do_not_divide():
    with pytest.raises(ValueError, match="q has 3 heads"):
        attend(queries(1, num_heads=3), *chunk(4), SCALE)


def test_attend_refuses_a_mask_that_hides_every_key():
    with pytest.raises(ValueError, match="mask"):
        attend(queries(1), *chunk(4), SCALE, mask=torch.zeros(4, dtype=torch.bool))
