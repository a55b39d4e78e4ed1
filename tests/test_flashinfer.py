# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's ring on a CPU: vLLM's builder and impl around a stand-in package.

Not yet run on a GPU; what the stand-in leaves out is in ``flashinfer_stand_in``.
"""

import sys
from dataclasses import replace

import pytest
import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from tests import flashinfer_stand_in, kernels
from tests.kernels import BLOCK, STEPS, Layer, Step, W, specs, worst_difference
from tests.test_gpu_backends import (
    copy_out_reversed,
    decode_batch,
    engine_config,
    stale_buffer,
)
from vllm_ringwindow import compat, policy
from vllm_ringwindow.attention import builder as builder_module
from vllm_ringwindow.geometry import ring_blocks

R = ring_blocks(W, BLOCK)

# Passes in place, staged, in place, staged, in place: each has a plan of its own.
IN_TURN = [Step({0: 1, 1: 90, 2: 20, 3: 70, 4: 10})]
SOME = [*STEPS[:24], *IN_TURN, *[Step(dict.fromkeys(range(5), 1))] * 4]


@pytest.fixture(scope="module")
def ring_module():
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield flashinfer_stand_in.install(monkeypatch)


@pytest.fixture(scope="module")
def config(models):
    return engine_config(models("gemma3", W))


@pytest.fixture
def pair(config, ring_module, monkeypatch):
    """Makes stock's and the ring's layer."""

    def make(layout="NHD", graphs=False, **fields) -> tuple[Layer, Layer]:
        names = {"NHD": "LBNHC", "HND": "LBHNC"}
        monkeypatch.setattr(config.cache_config, "kv_cache_layout", names[layout])
        mode = CUDAGraphMode.FULL_DECODE_ONLY if graphs else CUDAGraphMode.NONE
        monkeypatch.setattr(config.compilation_config, "cudagraph_mode", mode)
        ring = ring_module.RingFlashInferBackend
        both = specs(W, fields.pop("block_size", BLOCK))
        fields |= dict(layout=layout)
        return (
            Layer(config, ring.inner, both["stock"], 5, **fields),
            Layer(config, ring, both["ring"], 5, **fields),
        )

    yield make
    config.compilation_config.static_forward_context.clear()


@pytest.mark.feature("FlashInfer without XQA and TRTLLM-gen", "not yet run on a GPU")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_ring_equals_stock_by_what_was_planned(pair, layout):
    """Decode, prefill in place and staged, mixed steps, across the wrap."""
    assert worst_difference(*pair(layout), STEPS) < 1e-5
    assert worst_difference(*pair(layout), IN_TURN) < 1e-5


@pytest.mark.parametrize("graphs", [False, True])
def test_padded_decode_batches(pair, graphs):
    """As a CUDA graph pads them, planned for one or not."""
    stock, ring = pair(graphs=graphs)
    assert worst_difference(stock, ring, SOME, pad_decodes_to=8) < 1e-5


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_with_blocks_that_prefix_caching_retains(pair, layout):
    stock, ring = pair(layout, retained=lambda block: block % 3 == 1)
    assert worst_difference(stock, ring, SOME) < 1e-5
    kept = [b for b in ring.rows[1][: -R - 1] if b]
    assert len(kept) > 2


def test_kernel_blocks_smaller_than_blocks(pair):
    stock, ring = pair(block_size=2 * BLOCK, kernel_block=BLOCK)
    assert worst_difference(stock, ring, SOME) < 1e-5


def test_softcaps(pair):
    stock, ring = pair(softcap=5.0)
    assert worst_difference(stock, ring, SOME) < 1e-5
    assert worst_difference(pair()[0], stock, SOME[:3]) > 1e-2


# -- what it plans with ----------------------------------------------------------------


def plans_of(monkeypatch):
    """Row lengths of every plan, in order."""
    wrapper = flashinfer_stand_in.PagedWrapper
    plan = wrapper._plan
    found: list[list[int]] = []

    def recording(self, qo, indptr, indices, last, lens, **traits):
        found.append(lens.tolist())
        plan(self, qo, indptr, indices, last, lens, **traits)

    monkeypatch.setattr(wrapper, "_plan", recording)
    return found


def test_plans_see_rebased_host_lengths(pair, monkeypatch):
    """Never more than a ring of a row in place, never more than its window staged."""
    _, ring = pair()
    plans = plans_of(monkeypatch)
    for step in (Step({0: 200}), Step({0: 1}), Step({0: 1, 1: 100}), Step({0: 50})):
        ring.builder.build(0, ring.metadata_of(step))
    assert plans[0] == [200]
    assert plans[1] == [201 - (201 - W) // BLOCK * BLOCK]
    assert plans[2:4] == [[202 - (202 - W) // BLOCK * BLOCK], [100]]
    assert plans[4] == [252 - (252 - 50 - W + 1) // BLOCK * BLOCK]


def test_planning_reads_nothing_back(pair, config):
    """On the meta device tensors have no values: reading one raises."""
    _, ring = pair()
    meta = torch.device("meta")
    with set_current_vllm_config(config):
        built = type(ring.builder)(ring.spec, ring_names(ring), config, meta)
    for step in (Step({0: 1, 1: 200, 2: 30}), Step({0: 1, 1: 1})):
        common = ring.metadata_of(step)
        on_device = replace(
            common,
            query_start_loc=common.query_start_loc.to(meta),
            seq_lens=common.seq_lens.to(meta),
            block_table_tensor=common.block_table_tensor.to(meta),
            slot_mapping=common.slot_mapping.to(meta),
        )
        built.build(0, on_device)


def ring_names(ring: Layer) -> list[str]:
    return [ring.layer.layer_name]


def test_with_drafts_the_lengths_in_place_are_the_devices(pair, monkeypatch):
    """The host knows a bound only; rows that are staged have no drafts."""
    _, ring = pair()
    ring.builder.build(0, ring.metadata_of(Step({0: 1, 1: 150})))  # makes the builders
    for builder in inner_builders(ring.builder):
        if builder is not ring.builder._pass_builders[True][0]:
            builder._num_speculative_tokens = 2
    common = ring.metadata_of(Step({0: 1, 1: 100}))
    plans = plans_of(monkeypatch)
    common.seq_lens_cpu_upper_bound[0] += 2
    read = []
    monkeypatch.setattr(
        torch.Tensor, "cpu", lambda t, cpu=torch.Tensor.cpu: read.append(t) or cpu(t)
    )
    metadata = ring.builder.build(0, common)
    assert [len(metadata.in_place), len(metadata.staged)] == [1, 1]
    assert plans == [[2], [250 - (150 - W + 1) // BLOCK * BLOCK]]
    assert [t.tolist() for t in read] == [[2]]


def test_passes_share_one_workspace_and_nothing_else(pair):
    """A workspace is 394 MiB and more; what a plan must keep is in its wrapper."""
    stock, ring = pair()
    assert worst_difference(stock, ring, IN_TURN) < 1e-5
    builders = inner_builders(ring.builder)
    assert len(builders) == 1 + 3 + 2
    assert len({b._get_workspace_buffer().data_ptr() for b in builders}) == 1
    assert len({id(b.paged_kv_indices) for b in builders}) == len(builders)


def inner_builders(builder) -> list:
    passes = builder._pass_builders
    return [builder.in_place_builder, *passes[False], *passes[True]]


# -- CUDA graphs -----------------------------------------------------------------------


def replayed(pair, monkeypatch, fault=None) -> float:
    """Decode steps of stock and of a graph that was captured on the ring.

    A replay has the wrapper, addresses and arguments of the capture; between replays
    only ``build`` runs.
    """
    stock, ring = pair(graphs=True)
    assert worst_difference(stock, ring, [Step({0: 30, 1: 100, 2: 61})]) < 1e-5
    decode = Step({0: 1, 1: 1, 2: 1})
    captured = ring.builder.build_for_cudagraph_capture(decode_batch(3, 1))
    build = ring.builder.build

    def build_and_replay(prefix, common):
        fresh = build(prefix, common).in_place[0]
        assert fresh.inner.decode.wrapper is captured.in_place[0].inner.decode.wrapper
        passes = [replace(captured.in_place[0], slots=fresh.slots)]
        return replace(captured, in_place=passes)

    monkeypatch.setattr(ring.builder, "build", build_and_replay)
    if fault:
        fault(monkeypatch, ring)
    return worst_difference(stock, ring, [decode] * 40)


def test_a_captured_graph_reads_what_is_planned(pair, monkeypatch):
    assert replayed(pair, monkeypatch) < 1e-5


def graph_not_planned(monkeypatch, ring):
    """The step's lengths stay on the host: the graph replays the capture's."""
    inner = ring.builder.in_place_builder
    monkeypatch.setattr(inner.paged_kv_last_page_len, "copy_to_gpu", lambda n: None)


def test_a_stale_graph_is_noticed(pair, monkeypatch):
    assert noticed(lambda: replayed(pair, monkeypatch, stale_buffer))
    assert noticed(lambda: replayed(pair, monkeypatch, graph_not_planned))


def test_decodes_of_mixed_steps_have_no_graphs(pair):
    """Nobody pads them: each number of them would have a wrapper of its own."""
    _, ring = pair(graphs=True)
    common = ring.metadata_of(Step({0: 1, 1: 1, 2: 150}))
    (part,) = ring.builder.build(0, common).in_place
    assert not part.inner.decode.wrapper.is_cuda_graph_enabled
    assert not ring.builder.in_place_builder._decode_wrappers_cudagraph
    common = ring.metadata_of(Step({0: 1, 1: 1}))
    (part,) = ring.builder.build(0, common).in_place
    assert part.inner.decode.wrapper.is_cuda_graph_enabled


# -- what breaks it --------------------------------------------------------------------


def on_every_view(monkeypatch, change):
    view = builder_module.in_place_view

    def broken(common, group, shape, buffers):
        made = view(common, group, shape, buffers)
        return change(made, common, slice(group.first, group.last))

    monkeypatch.setattr(builder_module, "in_place_view", broken)


def wrong_rebasing(monkeypatch, ring):
    """One block short in decode: every row that is long enough has a block less."""

    def change(made, common, rows):
        host = made.seq_lens_cpu_upper_bound
        if made.max_query_len == 1:
            host = torch.where(host > 2 * BLOCK, host - BLOCK, host)
        return made.replace(seq_lens_cpu_upper_bound=host)

    on_every_view(monkeypatch, change)


def host_lengths_not_rebased(monkeypatch, ring):
    def change(made, common, rows):
        host = common.seq_lens_cpu_upper_bound[rows]
        return made.replace(seq_lens_cpu_upper_bound=host)

    on_every_view(monkeypatch, change)


def table_not_gathered(monkeypatch, ring):
    def change(made, common, rows):
        return made.replace(block_table_tensor=common.block_table_tensor[rows])

    on_every_view(monkeypatch, change)


def window_off_by_one(monkeypatch, ring):
    """In the layer and in every plan: vLLM checks that they agree."""
    left, right = ring.impl.sliding_window
    ring.impl.sliding_window, ring.impl.window_left = (left - 1, right), left - 1
    for builder in inner_builders(ring.builder):
        builder.window_left -= 1


def one_builder_for_all_passes(monkeypatch, ring):
    """The last plan of a step is run by all of its passes."""
    monkeypatch.setattr(
        ring.builder,
        "inner_builders",
        lambda groups: [ring.builder.in_place_builder] * len(groups),
    )


def noticed(run) -> bool:
    try:
        return run() > 1e-2
    except (AssertionError, ValueError, RuntimeError, IndexError):
        return True


@pytest.mark.parametrize(
    "fault",
    [
        wrong_rebasing,
        host_lengths_not_rebased,
        table_not_gathered,
        stale_buffer,
        window_off_by_one,
        copy_out_reversed,
        one_builder_for_all_passes,
    ],
)
def test_a_broken_adapter_is_noticed(pair, monkeypatch, fault):
    stock, ring = pair()
    fault(monkeypatch, ring)
    assert noticed(lambda: worst_difference(stock, ring, SOME))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(indptr=[0, 1, 4]), "indptr runs beyond indices"),
        (dict(last_page_len=[0, 3]), "last_page_len is not in 1..page_size"),
        (dict(last_page_len=[BLOCK + 1, 3]), "last_page_len is not in 1..page_size"),
        (dict(indptr=[0, 0, 2]), "last_page_len of a row of no pages"),
        (dict(indptr=[2, 1, 2]), "indptr decreases"),
    ],
)
def test_the_stand_in_keeps_flashinfers_contract(change, message):
    arguments = dict(indptr=[0, 1, 3], indices=[5, 6, 7], last_page_len=[2, 3]) | change
    wrapper = flashinfer_stand_in.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(1, dtype=torch.uint8)
    )
    with pytest.raises(ValueError, match=message):
        wrapper.plan(
            **{k: torch.tensor(v, dtype=torch.int32) for k, v in arguments.items()},
            num_qo_heads=kernels.HEADS,
            num_kv_heads=kernels.KV_HEADS,
            head_dim=kernels.HEAD_SIZE,
            page_size=BLOCK,
            q_data_type=torch.float32,
            kv_data_type=torch.float32,
        )


# -- where it is chosen ----------------------------------------------------------------

SLIDING = AttentionSelectorConfig(
    head_size=64,
    dtype=torch.bfloat16,
    kv_cache_dtype=None,
    block_size=None,
    has_sliding_window=True,
)


def routed(config, traits=SLIDING) -> str:
    """What a layer gets where the platform chooses FlashInfer."""
    with set_current_vllm_config(config):
        return compat._get_attn_backend_cls(
            lambda *args, **kwargs: policy.FLASHINFER,
            None,
            AttentionBackendEnum[policy.BACKEND_NAME],
            traits,
        )


def test_routing_to_flashinfer_imports_nothing(config, monkeypatch):
    """The package needs CUDA: only a layer that gets the backend imports it."""
    stand_in = flashinfer_stand_in
    names = {"flashinfer", stand_in.VLLM_MODULE, stand_in.RING_MODULE}
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert routed(config) == policy.RING_BACKENDS[policy.FLASHINFER]
    assert names.isdisjoint(sys.modules)
    assert AttentionBackendEnum.FLASHINFER.get_path() == policy.FLASHINFER


@pytest.mark.feature(
    "FlashInfer's XQA and TRTLLM-gen kernels, NVFP4 KV cache", "passes through"
)
def test_kernels_that_nothing_stands_in_for_pass_through(config, monkeypatch):
    assert routed(config, SLIDING._replace(kv_cache_dtype="nvfp4")) == policy.FLASHINFER
    monkeypatch.setattr(
        "vllm.utils.flashinfer.supports_trtllm_attention", lambda is_prefill: True
    )
    assert routed(config) == policy.FLASHINFER
    assert "use_trtllm_attention=false" in policy.kernel_reason(
        policy.FLASHINFER, config
    )
    monkeypatch.setattr(config.attention_config, "use_trtllm_attention", False)
    assert routed(config) == policy.RING_BACKENDS[policy.FLASHINFER]
    assert policy.kernel_reason("other", config) is None
