# SPDX-License-Identifier: Apache-2.0
"""The metadata builder that wraps an inner backend's builders."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    max_decode_query_len,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from vllm_ringwindow.attention.metadata import (
    InPlacePass,
    PassThroughMetadata,
    RingMetadata,
    RingShape,
    RowGroup,
    StagedPass,
    ViewBuffers,
    group_rows,
    in_place_view,
    staged_view,
)
from vllm_ringwindow.attention.staging import sharing_targets, staging_blocks
from vllm_ringwindow.core.spec import RingWindowSpec


class RingMetadataBuilder(AttentionMetadataBuilder):
    """Builds :class:`RingMetadata`, or passes through when the group has no ring.

    A step's metadata is built before its first layer runs, and some inner builders
    keep what they planned (FlashInfer's wrappers and page indices, FA3's scheduler
    metadata). So ``in_place_builder`` has the steps of a single in-place pass, which
    are the ones that CUDA graphs capture, and in any other step each pass has a builder
    of its own.
    """

    inner_builder_cls: ClassVar[type[AttentionMetadataBuilder]]
    supports_update_block_table = False  # a second group's rows need their own view
    supports_draft_decode_metadata_update = False

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._inner_args = (kv_cache_spec, layer_names, vllm_config, device)
        self.in_place_builder = self.inner_builder_cls(*self._inner_args)
        self.reorder_batch_threshold = self.in_place_builder.reorder_batch_threshold
        self.ring: RingShape | None = None
        if isinstance(kv_cache_spec, RingWindowSpec):
            self._pass_builders: dict[bool, list[AttentionMetadataBuilder]] = {
                staged: [self.make_pass_builder(staged)] for staged in (False, True)
            }
            self.reorder_batch_threshold = max_decode_query_len(vllm_config)
            self.ring = RingShape(
                window=kv_cache_spec.sliding_window,
                block_size=kv_cache_spec.block_size,
                num_ring_blocks=kv_cache_spec.num_ring_blocks,
                num_lookahead=vllm_config.num_lookahead_tokens,
                decode_threshold=self.reorder_batch_threshold,
                num_staging_blocks=staging_blocks(
                    vllm_config, kv_cache_spec.sliding_window, kv_cache_spec.block_size
                ),
                keep_staging=not sharing_targets(vllm_config).isdisjoint(layer_names),
                num_null_blocks=kv_cache_spec.ring.split,
            )
            max_rows = max(
                vllm_config.scheduler_config.max_num_seqs,
                vllm_config.compilation_config.max_cudagraph_capture_size or 0,
            )
            self.buffers = ViewBuffers(max_rows, self.ring, device)

    def make_pass_builder(self, staged: bool) -> AttentionMetadataBuilder:
        """An inner builder for one pass of a step that has several."""
        return self.inner_builder_cls(*self._inner_args)

    def inner_builders(self, groups: list[RowGroup]) -> list[AttentionMetadataBuilder]:
        """One inner builder for each pass of a step; more are made when needed."""
        if len(groups) == 1 and not groups[0].staged:
            return [self.in_place_builder]
        used = {False: 0, True: 0}
        builders = []
        for group in groups:
            made = self._pass_builders[group.staged]
            if used[group.staged] == len(made):
                with set_current_vllm_config(self.vllm_config):
                    made.append(self.make_pass_builder(group.staged))
            builders.append(made[used[group.staged]])
            used[group.staged] += 1
        return builders

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        inner = cls.inner_builder_cls.get_cudagraph_support(vllm_config, kv_cache_spec)
        return min(inner, AttentionCGSupport.UNIFORM_BATCH, key=lambda s: s.value)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RingMetadata | PassThroughMetadata:
        common = common_attn_metadata
        if self.ring is None:
            return PassThroughMetadata(
                inner=self.in_place_builder.build(
                    common_prefix_len, common, fast_build
                ),
                slots=common.slot_mapping,
            )
        if common.causal is not True:
            raise NotImplementedError(
                "ring: non-causal attention reached a sliding-window layer on a ring; "
                "run this model without --attention-backend ring"
            )
        metadata = RingMetadata(num_actual_tokens=common.num_actual_tokens)
        query_start = common.query_start_loc_cpu[: common.num_reqs + 1].numpy()
        if common.max_query_len <= self.ring.decode_threshold:
            # Always in place, whatever the lengths: a captured graph knows none.
            groups = [RowGroup(0, common.num_reqs, staged=False)]
        else:
            seq_lens = self._host_seq_lens(common)
            groups = group_rows(query_start, seq_lens, self.ring)
        num_blocks = 0
        for group, builder in zip(groups, self.inner_builders(groups), strict=True):
            if group.staged:
                first_block = num_blocks if self.ring.keep_staging else 0
                view, copies, num_blocks = staged_view(
                    common, group, seq_lens, self.ring, first_block
                )
                start = int(query_start[group.first])
                metadata.staged.append(
                    StagedPass(
                        tokens=slice(start, start + view.num_actual_tokens),
                        slots=view.slot_mapping,
                        num_blocks=num_blocks,
                        inner=builder.build(0, view, fast_build),
                        **copies,
                    )
                )
            else:
                view = in_place_view(common, group, self.ring, self.buffers)
                start = int(query_start[group.first])
                metadata.in_place.append(
                    InPlacePass(
                        tokens=slice(start, start + view.num_actual_tokens),
                        slots=view.slot_mapping,
                        inner=builder.build(0, view, fast_build),
                    )
                )
        return metadata

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> RingMetadata | PassThroughMetadata:
        """As the inner builder would, on the ring's own buffers.

        Some set ``seq_lens`` to 1, in place, so that capturing is fast.
        """
        if self.ring is None:
            return PassThroughMetadata(
                inner=self.in_place_builder.build_for_cudagraph_capture(
                    common_attn_metadata
                ),
                slots=common_attn_metadata.slot_mapping,
            )
        metadata = self.build(0, common_attn_metadata)
        assert isinstance(metadata, RingMetadata)
        if metadata.staged or len(metadata.in_place) != 1:
            raise NotImplementedError(
                "ring: only batches of decodes are captured in a CUDA graph; set "
                '--compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE"}\''
            )
        view = in_place_view(
            common_attn_metadata,
            RowGroup(0, common_attn_metadata.num_reqs, staged=False),
            self.ring,
            self.buffers,
        )
        inner = self.in_place_builder.build_for_cudagraph_capture(view)
        metadata.in_place = [replace(metadata.in_place[0], inner=inner)]
        return metadata

    @staticmethod
    def _host_seq_lens(common: CommonAttentionMetadata) -> np.ndarray:
        """``[N]`` lengths on the host, exact for prefill rows (I12).

        On a CPU the device's own: a drafter may move ``seq_lens`` on and leave the
        host's copy behind.
        """
        lens = common.seq_lens
        if lens.device.type != "cpu":
            assert common.seq_lens_cpu_upper_bound is not None
            lens = common.seq_lens_cpu_upper_bound
        return lens[: common.num_reqs].numpy()
