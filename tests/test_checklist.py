# SPDX-License-Identifier: Apache-2.0
"""The go-live checklist for a ring, on real engines, each with what breaks it.

Logits equal to the naive window; the token on the window's edge visible and the next
one not; prefill shorter than, equal to and longer than W; memory flat; a way back (the
last one is in ``test_engine_parity``, with batch 1 and batch 8).
"""

from dataclasses import replace

import pytest
import torch
from xformers.ops.fmha.attn_bias import (
    LowerTriangularFromBottomRightLocalAttentionMask,
)

from tests.harness import (
    RING,
    STOCK,
    assert_same,
    differs,
    engine,
    random_prompts,
    run,
)
from vllm_ringwindow.attention import builder
from vllm_ringwindow.attention.cpu import RingCPUImpl
from vllm_ringwindow.attention.metadata import RingMetadata, staged_view
from vllm_ringwindow.core.manager import RingBlockManager
from vllm_ringwindow.core.spec import RingWindowSpec

pytestmark = pytest.mark.engine

W = 64
R = 3  # ring blocks of 32 tokens


@pytest.fixture(scope="module")
def gemma(models):
    return models("gemma3", W)


@pytest.fixture(scope="module")
def mistral(models):
    return models("mistral", W)


# -- logits equal to the naive window --------------------------------------------------


def record_layers(monkeypatch):
    """Record q, k, v and output of every ring layer's forward, per layer name."""
    seen: dict[str, list[tuple[torch.Tensor, ...]]] = {}
    forward = RingCPUImpl.forward

    def recording(self, layer, query, key, value, kv_cache, metadata, output, **kwargs):
        result = forward(
            self, layer, query, key, value, kv_cache, metadata, output=output, **kwargs
        )
        if isinstance(metadata, RingMetadata):
            n = metadata.num_actual_tokens
            tensors = (query[:n], key[:n], value[:n], output[:n])
            seen.setdefault(layer.layer_name, []).append(
                tuple(t.clone().double() for t in tensors)
            )
        return result

    monkeypatch.setattr(RingCPUImpl, "forward", recording)
    return seen


def masked_attention(q, k, v, window, scale):
    """Softmax attention under xformers' mask, float64. ``[tokens, heads, size]``."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    mask = LowerTriangularFromBottomRightLocalAttentionMask(window).materialize(
        (len(q), len(k)), dtype=torch.float64
    )
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale + mask
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@pytest.mark.parametrize("length", [W // 2, W, 3 * W + 11])
def test_every_ring_layer_equals_xformers_window_mask(gemma, monkeypatch, length):
    """Prefill <, =, > W in chunks, then decode across the wrap; and W - 1 is not W."""
    seen = record_layers(monkeypatch)
    with engine(gemma, RING, max_num_batched_tokens=50) as e:
        e.run(random_prompts([length]), 2 * W)
    assert len(seen) == 5
    for steps in seen.values():
        q, k, v, output = (torch.cat(parts) for parts in zip(*steps))
        assert len(q) == length + 2 * W - 1
        expected = masked_attention(q, k, v, W, 32**-0.5)
        assert (output - expected).abs().max() < 1e-5
        off_by_one = masked_attention(q, k, v, W - 1, 32**-0.5)
        assert (output - off_by_one).abs().max() > 1e-3


# -- the window's edge -----------------------------------------------------------------


@pytest.mark.parametrize("budget", [32, 512], ids=["chunked", "one-chunk"])
def test_the_token_on_the_edge_is_visible_and_the_next_one_is_not(models, budget):
    """One sliding layer: the logits after position p depend on p-W+1 .. p alone."""
    (prompt,) = random_prompts([3 * W + 5])
    last = len(prompt) - 1

    def changed(position):
        return [
            *prompt[:position],
            (prompt[position] + 1) % 512,
            *prompt[position + 1 :],
        ]

    one_layer = models("mistral", W, layers=1)
    options = dict(max_num_batched_tokens=budget, enable_prefix_caching=False)
    with engine(one_layer, RING, **options) as e:
        plain, edge, beyond = (
            e.run([p], 1, logprobs=20)[0]
            for p in (prompt, changed(last - W + 1), changed(last - W))
        )
    assert beyond.tokens == plain.tokens
    assert beyond.logprobs == pytest.approx(plain.logprobs, abs=1e-6)
    assert abs(edge.logprobs[0] - plain.logprobs[0]) > 1e-3 or (
        edge.tokens != plain.tokens
    )


@pytest.mark.parametrize("generated", [W - 1, W])
def test_the_edge_moves_with_decode(models, generated):
    """After W - 1 generated tokens the prompt's last one is at the edge, then gone."""
    (prompt,) = random_prompts([2 * W])
    one_layer = models("mistral", W, layers=1)
    with engine(one_layer, RING, enable_prefix_caching=False) as e:
        (plain,) = e.run([prompt], generated)
        tail = list(plain.tokens)
        other = [*prompt[:-1], (prompt[-1] + 1) % 512]
        a, b = e.run([prompt + tail, other + tail], 1)
    difference = abs(a.logprobs[0] - b.logprobs[0]) + (a.tokens != b.tokens)
    if generated == W - 1:
        assert difference > 1e-4
    else:
        assert difference <= 1e-5


# -- memory is flat --------------------------------------------------------------------


def count_pool_calls(e):
    taken: list[int] = []
    get_new_blocks = e.pool.get_new_blocks

    def counting(num_blocks):
        taken.append(num_blocks)
        return get_new_blocks(num_blocks)

    e.pool.get_new_blocks = counting
    return taken


def test_decode_of_eight_windows_takes_nothing_from_the_pool(mistral):
    """All layers sliding, caching off: the pool is not even called after R blocks."""
    with engine(mistral, RING, enable_prefix_caching=False) as e:
        taken = count_pool_calls(e)
        held = []
        e.after_schedule.append(lambda _: held.append(e.num_free))
        e.run(random_prompts([2 * W]), 8 * W)
    assert taken == [R]
    assert len(set(held[1:-1])) == 1


def test_a_hybrid_decode_takes_blocks_for_the_full_layers_only(gemma):
    with engine(gemma, RING, enable_prefix_caching=False) as e:
        taken = count_pool_calls(e)
        by_ring = []
        e.after_schedule.append(
            lambda _: by_ring.append(
                [
                    len({b.block_id for b in blocks if not b.is_null})
                    for ring in e.rings
                    for blocks in ring.req_to_blocks.values()
                ]
            )
        )
        e.run(random_prompts([2 * W]), 8 * W)
    full = (2 * W + 8 * W - 1) // 32 + 1
    assert sum(taken) == full + len(by_ring[0]) * R
    assert all(held == [R] * 5 for held in by_ring[:-1])


def test_stock_does_take_blocks_in_decode(mistral):
    """The counter counts: stock takes one block per 32 tokens, for ever."""
    with engine(mistral, STOCK, enable_prefix_caching=False) as e:
        taken = count_pool_calls(e)
        e.run(random_prompts([2 * W]), 8 * W)
    assert len(taken) > 8 * W // 32


# -- the comparisons can fail ----------------------------------------------------------


def window_off_by_one(monkeypatch):
    """The inner kernel's window, one token short."""
    init = RingCPUImpl.__init__

    def broken(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if self.sliding_window > 0:
            self.sliding_window -= 1

    monkeypatch.setattr(RingCPUImpl, "__init__", broken)


def view_off_by_a_block(monkeypatch):
    view = builder.in_place_view

    def broken(common, group, shape, buffers):
        return view(common, group, replace(shape, window=shape.window - 32), buffers)

    monkeypatch.setattr(builder, "in_place_view", broken)


def ring_one_block_short(monkeypatch):
    """The scheduler recycles a block too early; the worker's view is right."""
    init = RingBlockManager.__init__

    def broken(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.num_ring_blocks -= 1

    monkeypatch.setattr(RingBlockManager, "__init__", broken)


def copy_out_reversed(monkeypatch):
    def broken(*args):
        made, copies, num_blocks = staged_view(*args)
        copies["copy_out_to"] = copies["copy_out_to"].flip(0)
        return made, copies, num_blocks

    monkeypatch.setattr(builder, "staged_view", broken)


def copy_out_before_the_update(monkeypatch):
    def broken(*args):
        made, copies, num_blocks = staged_view(*args)
        for name in ("copy_out_from", "copy_out_to"):
            copies[name] = copies[name][:0]
        return made, copies, num_blocks

    monkeypatch.setattr(builder, "staged_view", broken)


def update_block_table_left_on(monkeypatch):
    """The second group of rings gets the metadata that was built for the first."""
    cls = builder.RingMetadataBuilder
    monkeypatch.setattr(cls, "supports_update_block_table", True)
    monkeypatch.setattr(
        cls, "update_block_table", lambda self, metadata, table, slots: metadata
    )


@pytest.fixture(scope="module")
def long_run(gemma):
    """Prompts, options, and stock's answers, which the ring's equal."""
    prompts = random_prompts([40, 3 * W, 6 * W + 3])
    options = dict(max_num_batched_tokens=100)
    expected = run(gemma, STOCK, prompts, 80, **options)
    assert_same(expected, run(gemma, RING, prompts, 80, **options))
    return prompts, options, expected


@pytest.mark.parametrize(
    "fault",
    [
        window_off_by_one,
        view_off_by_a_block,
        ring_one_block_short,
        copy_out_reversed,
        copy_out_before_the_update,
        update_block_table_left_on,
    ],
)
def test_parity_notices(gemma, long_run, monkeypatch, fault):
    prompts, options, expected = long_run
    fault(monkeypatch)
    with engine(gemma, RING, **options) as e:
        assert differs(expected, e.run(prompts, 80))


def test_a_ring_too_small_for_a_decode_stops_the_engine(gemma, monkeypatch):
    """Rather than let the kernel read past the view."""
    size = RingWindowSpec.num_ring_blocks.fget
    monkeypatch.setattr(
        RingWindowSpec, "num_ring_blocks", property(lambda self: size(self) - 1)
    )
    with engine(gemma, RING) as e, pytest.raises(AssertionError):
        e.run(random_prompts([3 * W]), 40)
