# SPDX-License-Identifier: Apache-2.0
"""GPU adapters as far as a CPU can execute them: everything around the kernels.

Ring and stock run vLLM's own builders and impls through the same stand-in kernel
(``kernels``), or through vLLM's Triton kernels in Triton's interpreter. What is left,
the kernels on a GPU, is ``benchmarks/gpu_check.py``. Not yet run on a GPU.
"""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from tests import kernels
from tests.kernels import BLOCK, STEPS, Layer, Step, W, specs, worst_difference
from vllm_ringwindow.attention import builder as builder_module
from vllm_ringwindow.attention.metadata import RingMetadata, ViewBuffers
from vllm_ringwindow.attention.view import view_reference
from vllm_ringwindow.geometry import ring_blocks

R = ring_blocks(W, BLOCK)
BACKENDS = ("flash", "triton")


def engine_config(model):
    """A configuration as a worker has it; head counts are the tiny model's."""
    return EngineArgs(
        model=str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        block_size=BLOCK,
        kv_cache_memory_bytes=1 << 28,
    ).create_engine_config()


@pytest.fixture(scope="module")
def config(models):
    return engine_config(models("gemma3", W))


@pytest.fixture
def pair(config, monkeypatch):
    """Makes stock's and the ring's layer of a backend, kernels replaced."""

    def make(name: str, **fields) -> tuple[Layer, Layer]:
        if name == "flash":
            from vllm.v1.attention.backends import flash_attn as module

            from vllm_ringwindow.attention.flash import RingFlashBackend as ring

            monkeypatch.setattr(module, "get_flash_attn_version", lambda **kw: 2)
            monkeypatch.setattr(
                module, "flash_attn_supports_sinks", lambda: True, raising=False
            )
            monkeypatch.setattr(
                module,
                "flash_attn_varlen_func",
                kernels.flash_attn_varlen_func,
                raising=False,
            )
            monkeypatch.setattr(
                module,
                "reshape_and_cache_flash",
                kernels.reshape_and_cache,
                raising=False,
            )
            inner = module.FlashAttentionBackend
        else:
            from vllm.v1.attention.backends import triton_attn as module

            from vllm_ringwindow.attention.triton import RingTritonBackend as ring

            monkeypatch.setattr(module, "unified_attention", kernels.unified_attention)
            monkeypatch.setattr(
                module, "triton_reshape_and_cache_flash", kernels.reshape_and_cache
            )
            inner = module.TritonAttentionBackend
        both = specs(W, fields.pop("block_size", BLOCK))
        return (
            Layer(config, inner, both["stock"], 4, **fields),
            Layer(config, ring, both["ring"], 4, **fields),
        )

    return make


@pytest.mark.feature(
    "FlashAttention, Triton attention; ROCm by Triton", "not yet run on a GPU"
)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ring_equals_stock_through_the_same_kernel(pair, backend, layout):
    """Decode, prefill in place and staged, mixed steps, across the wrap."""
    stock, ring = pair(backend, layout=layout)
    assert worst_difference(stock, ring, STEPS) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_decode_batches(pair, backend):
    """As a CUDA graph pads them: rows without tokens at the end."""
    stock, ring = pair(backend)
    assert worst_difference(stock, ring, STEPS, pad_decodes_to=8) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_blocks_that_prefix_caching_retains(pair, backend):
    """Physical blocks of a chunk outside the ring, and blocks that stay in place."""
    stock, ring = pair(backend, retained=lambda block: block % 3 == 1)
    assert worst_difference(stock, ring, STEPS) < 1e-5
    kept = [b for b in ring.rows[1][: -R - 1] if b]
    assert len(kept) > 2


@pytest.mark.feature(
    "blocks that a kernel splits (`--block-size`)", "not yet run on a GPU"
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("retained", [False, True])
def test_kernel_blocks_smaller_than_blocks(pair, backend, retained):
    """Blocks of 32 tokens for a kernel that takes 16: null blocks are two, too."""
    stock, ring = pair(
        backend,
        block_size=2 * BLOCK,
        kernel_block=BLOCK,
        retained=lambda block: retained and block % 2 == 1,
    )
    assert ring.builder.ring.block_size == BLOCK
    assert ring.builder.ring.num_null_blocks == 2
    assert worst_difference(stock, ring, STEPS) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_and_softcaps(pair, backend):
    sinks = torch.linspace(-1, 1, kernels.HEADS)
    stock, ring = pair(backend, sinks=sinks, softcap=5.0)
    assert worst_difference(stock, ring, STEPS[:20]) < 1e-5
    plain, _ = pair(backend)
    other, _ = pair(backend, sinks=sinks)
    assert worst_difference(plain, other, STEPS[:3]) > 1e-2


# -- what breaks it --------------------------------------------------------------------


def wrong_rebasing(monkeypatch, ring):
    view = builder_module.in_place_view

    def broken(*args):
        made = view(*args)
        made.seq_lens.add_(BLOCK)
        return made

    monkeypatch.setattr(builder_module, "in_place_view", broken)


def stale_buffer(monkeypatch, ring):
    """The view of the step before: what a graph reads if nothing is written."""
    view = builder_module.in_place_view

    def broken(common, group, shape, buffers):
        table = buffers.table.clone()
        made = view(common, group, shape, buffers)
        buffers.table.copy_(table)
        return made

    monkeypatch.setattr(builder_module, "in_place_view", broken)


def window_off_by_one(monkeypatch, ring):
    left, right = ring.impl.sliding_window
    ring.impl.sliding_window = (left - 1, right)


def copy_out_reversed(monkeypatch, ring):
    view = builder_module.staged_view

    def broken(*args):
        made, copies, num_blocks = view(*args)
        copies["copy_out_to"] = copies["copy_out_to"].flip(0)
        return made, copies, num_blocks

    monkeypatch.setattr(builder_module, "staged_view", broken)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "fault", [wrong_rebasing, stale_buffer, window_off_by_one, copy_out_reversed]
)
def test_a_broken_adapter_is_noticed(pair, monkeypatch, backend, fault):
    stock, ring = pair(backend)
    fault(monkeypatch, ring)
    try:
        worst = worst_difference(stock, ring, STEPS)
    except (AssertionError, RuntimeError, IndexError):
        return
    assert worst > 1e-2


def test_update_block_table_is_off(pair):
    """FlashAttention's would give the second group of rings the first one's view."""
    _, ring = pair("flash")
    inner = type(ring.builder).inner_builder_cls
    assert inner.supports_update_block_table
    assert not ring.builder.supports_update_block_table
    assert not ring.builder.supports_draft_decode_metadata_update
    common = ring.metadata_of(Step({0: 100}))
    first = ring.builder.build(0, common)
    other = common.block_table_tensor + 7
    updated = inner.update_block_table(
        ring.builder.in_place_builder,
        first.staged[0].inner,
        other,
        common.slot_mapping,
    )
    # On, the kernel would see absolute columns beside lengths rebased to the ring.
    assert updated.block_table.shape[1] != first.staged[0].inner.block_table.shape[1]


# -- CUDA graphs -----------------------------------------------------------------------


def decode_batch(
    rows: int, length: int, device: str = "cpu"
) -> CommonAttentionMetadata:
    starts = torch.arange(rows + 1, dtype=torch.int32)
    lengths = torch.full((rows,), length, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=rows,
        num_actual_tokens=rows,
        max_query_len=1,
        max_seq_len=512,
        block_table_tensor=torch.zeros(rows, 36, dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(rows, dtype=torch.int64, device=device),
    )


@pytest.mark.feature("CUDA graphs of decode batches", "not yet run on a GPU")
@pytest.mark.parametrize("backend", BACKENDS)
def test_addresses_and_shapes_never_change(pair, backend):
    """A captured graph reads the same table and lengths at every replay."""
    _, ring = pair(backend)
    common = decode_batch(8, 300)
    captured = ring.builder.build_for_cudagraph_capture(common)
    (first,) = captured.in_place

    def identity(metadata):
        (part,) = metadata.in_place
        inner = part.inner
        tensors = (inner.block_table, inner.seq_lens, inner.query_start_loc, part.slots)
        return [(t.data_ptr(), tuple(t.shape), t.stride()) for t in tensors]

    assert first.inner.block_table.shape == (8, R)
    for length in (1, 17, 100, 511):
        common.seq_lens.fill_(length)
        common.seq_lens_cpu_upper_bound.fill_(length)
        common.max_seq_len = length
        again = ring.builder.build(0, common)
        assert identity(again) == identity(captured)
        assert again.in_place[0].inner.max_seq_len <= R * BLOCK
        base = max(length - W, 0) // BLOCK
        assert set(again.in_place[0].inner.seq_lens.tolist()) == {length - base * BLOCK}


def test_padded_rows_are_empty(pair):
    _, ring = pair("triton")
    common = decode_batch(8, 200)
    common.seq_lens[5:] = 0
    common.query_start_loc[5:] = 5
    common.query_start_loc_cpu[5:] = 5
    (part,) = ring.builder.build(0, common).in_place
    assert part.inner.seq_lens[5:].tolist() == [0, 0, 0]
    assert (part.inner.seq_lens[:5] > 0).all()


def test_only_decodes_are_captured(pair, config):
    _, ring = pair("triton")
    support = type(ring.builder).get_cudagraph_support(config, ring.spec)
    assert support == AttentionCGSupport.UNIFORM_BATCH
    common = ring.metadata_of(Step({0: 200}))
    with pytest.raises(NotImplementedError, match="cudagraph_mode"):
        ring.builder.build_for_cudagraph_capture(common)


@pytest.mark.parametrize("backend", BACKENDS)
def test_building_never_waits_for_the_device(pair, config, backend):
    """On the meta device tensors have no values: reading one raises."""
    _, ring = pair(backend)
    meta = torch.device("meta")
    maker = type(ring.builder)
    with set_current_vllm_config(config):
        built = maker(ring.spec, [], config, meta)
    common = decode_batch(6, 300, "meta")
    assert isinstance(built.build(0, common), RingMetadata)
    mixed = ring.metadata_of(Step({0: 1, 1: 200, 2: 30}))
    on_device = replace(
        mixed,
        query_start_loc=mixed.query_start_loc.to(meta),
        seq_lens=mixed.seq_lens.to(meta),
        block_table_tensor=mixed.block_table_tensor.to(meta),
        slot_mapping=mixed.slot_mapping.to(meta),
    )
    metadata = built.build(0, on_device)
    assert metadata.staged and metadata.in_place
    with pytest.raises((RuntimeError, NotImplementedError)):
        on_device.seq_lens.tolist()


def test_of_a_chunk_only_what_is_physical_is_copied_out(pair):
    _, ring = pair("triton")
    common = ring.metadata_of(Step({0: 200}))
    kept = ring.builder.build(0, common).staged[0]
    shape = ring.builder.ring
    # 200 tokens are 13 blocks; the last R are physical.
    assert kept.copy_out_to.tolist() == ring.rows[0][-R:]
    assert len(ring.rows[0]) == 13 and shape.num_ring_blocks == R


# -- Model Runner V2 -------------------------------------------------------------------


def test_model_runner_v2_hands_over_what_the_builder_takes(pair):
    """Its own function that builds metadata, with a ring and a full-attention group."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
    )
    from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
    from vllm.v1.worker.utils import AttentionGroup

    stock, ring = pair("triton")
    full = FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=kernels.KV_HEADS,
        head_size=kernels.HEAD_SIZE,
        dtype=torch.float32,
    )
    layers = {"sliding": (ring, ring.spec), "full": (stock, full)}
    groups, attn_groups = [], []
    for number, (name, (layer, spec)) in enumerate(layers.items()):
        groups.append(KVCacheGroupSpec([name], spec))
        group = AttentionGroup(layer.backend, [name], spec, number)
        with set_current_vllm_config(layer.config):
            group.create_metadata_builders(layer.config, torch.device("cpu"))
        attn_groups.append([group])
    kv = KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups)
    common = ring.metadata_of(Step({0: 1, 1: 150, 2: 20}))

    def build(**more):
        return build_attn_metadata(
            attn_groups,
            num_reqs=common.num_reqs,
            num_tokens=common.num_actual_tokens,
            query_start_loc_gpu=common.query_start_loc,
            query_start_loc_cpu=common.query_start_loc_cpu,
            max_query_len=common.max_query_len,
            seq_lens=torch.cat([common.seq_lens, torch.zeros(5, dtype=torch.int32)]),
            max_seq_len=common.max_seq_len,
            block_tables=[common.block_table_tensor] * 2,
            slot_mappings=torch.stack([common.slot_mapping] * 2),
            kv_cache_config=kv,
            seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound,
            **more,
        )

    metadata = build()
    assert isinstance(metadata["sliding"], RingMetadata)
    assert len(metadata["sliding"].staged) == 1
    assert len(metadata["sliding"].in_place) == 2
    assert metadata["full"].block_table is common.block_table_tensor
    direct = ring.builder.build(0, common)
    for mine, theirs in zip(direct.in_place, metadata["sliding"].in_place, strict=True):
        assert torch.equal(mine.inner.block_table, theirs.inner.block_table)
        assert torch.equal(mine.slots, theirs.slots)
    common = decode_batch(4, 300)
    captured = build(for_cudagraph_capture=True)["sliding"]
    assert captured.in_place[0].inner.block_table.shape == (4, R)


# -- the fused view --------------------------------------------------------------------


def test_the_view_is_what_the_geometry_says():
    table = torch.arange(400, dtype=torch.int32).reshape(4, 100)
    lens = torch.tensor([1, 64, 65, 1600], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2, 5, 6], dtype=torch.int32)
    out, out_lens = torch.zeros(4, R, dtype=torch.int32), torch.zeros(4).int()
    view_reference(table, lens, starts, out, out_lens, W, BLOCK)
    for row, (length, new) in enumerate(zip(lens.tolist(), [1, 1, 3, 1])):
        base = max(length - new - W + 1, 0) // BLOCK
        columns = [min(base + i, 99) for i in range(R)]
        assert out[row].tolist() == table[row, columns].tolist()
        assert out_lens[row] == length - base * BLOCK


# -- Triton's interpreter --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
def test_vllms_triton_kernels_interpreted(models):
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_interpreted", models("gemma3", W)],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    worst = {
        line.split()[1]: float(line.split()[2])
        for line in done.stdout.splitlines()
        if line.startswith("WORST")
    }
    assert worst["none"] < 1e-5
    assert worst["window"] > 1e-2
    assert worst["view"] == 0


# -- on a GPU --------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_check_passes():
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_check.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_gpu_check_lists_its_stages():
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_check.py", "--dry-run"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    *stages, total = done.stdout.splitlines()
    assert len(stages) == 6 and float(total.split()[1]) <= 10
    assert all("needs" in line for line in stages)
    assert "a GPU" in done.stdout or torch.cuda.is_available()


# -- buffers ---------------------------------------------------------------------------


def test_view_buffers_are_as_wide_as_the_ring(pair):
    _, ring = pair("flash")
    buffers = ring.builder.buffers
    assert isinstance(buffers, ViewBuffers)
    rows = max(8, ring.config.compilation_config.max_cudagraph_capture_size or 0)
    assert buffers.table.shape == (rows, R)
    assert np.prod(buffers.table.shape) * 4 < 1 << 20
