# SPDX-License-Identifier: Apache-2.0
"""The attention layer's forward, around an inner impl."""

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl, AttentionLayer

from vllm_ringwindow.attention.metadata import PassThroughMetadata, RingMetadata
from vllm_ringwindow.attention.staging import (
    Staging,
    sharing_targets,
    staging_blocks,
)
from vllm_ringwindow.core.spec import RingWindowSpec


class RingImplMixin(AttentionImpl):
    """Put before an inner impl class: ``super()`` is the inner impl.

    The cache update happens in ``forward``: in a staged pass new K/V go to staging.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._vllm_config: VllmConfig = get_current_vllm_config()
        self._staging: Staging | None = None

    def reserve_staging(self, spec: RingWindowSpec) -> None:
        """Allocate before memory is profiled (profile runs skip attention)."""
        num_blocks = staging_blocks(
            self._vllm_config, spec.sliding_window, spec.block_size
        )
        self.staging.reserve(num_blocks * spec.unpadded_page_size_bytes)

    @property
    def staging(self) -> Staging:
        """This layer's staging: shared, or its own if other layers read it (H8)."""
        if self._staging is None:
            config = self._vllm_config
            key: tuple = (
                id(config.compilation_config),  # one set per loaded model
                self.num_kv_heads,
                self.head_size,
                self.kv_cache_dtype,
            )
            layers = config.compilation_config.static_forward_context
            for name in sharing_targets(config):
                if layers[name].impl is self:
                    key += (name,)
            self._staging = Staging.shared(key, config.device_config.device)
        return self._staging

    def _staging_of_target(self, name: str) -> Staging:
        layers = self._vllm_config.compilation_config.static_forward_context
        return layers[name].impl.staging

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: RingMetadata | PassThroughMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Shapes as in the inner impl: ``[T, num_heads, head_size]`` and so on."""
        scales = (output_scale, output_block_scale)
        if attn_metadata is None:  # profiling
            return super().forward(
                layer, query, key, value, kv_cache, None, output, *scales
            )
        if isinstance(attn_metadata, PassThroughMetadata):
            if layer.kv_sharing_target_layer_name is None and key is not None:
                self.do_kv_cache_update(
                    layer, key, value, kv_cache, attn_metadata.slots
                )
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata.inner, output, *scales
            )

        # A sharing layer reads what its target wrote in this step and writes nothing
        # (H8). Read at forward time: one drafter sets it late.
        target = layer.kv_sharing_target_layer_name
        staging_buffer = (
            self.staging if target is None else self._staging_of_target(target)
        )
        for staged in attn_metadata.staged:
            t = staged.tokens
            staging = staging_buffer.as_blocks_of(kv_cache, staged.num_blocks)
            if target is None:
                staging[staged.copy_in_to] = kv_cache[staged.copy_in_from]
                self.do_kv_cache_update(layer, key[t], value[t], staging, staged.slots)
            self._attend(layer, query, key, value, staging, staged, output, scales)
            if target is None:
                kv_cache[staged.copy_out_to] = staging[staged.copy_out_from]
        for in_place in attn_metadata.in_place:
            t = in_place.tokens
            if target is None:
                self.do_kv_cache_update(
                    layer, key[t], value[t], kv_cache, in_place.slots
                )
            self._attend(layer, query, key, value, kv_cache, in_place, output, scales)
        return output

    def _attend(self, layer, query, key, value, cache, part, output, scales) -> None:
        """The inner impl on one pass's tokens. A sharing layer has no key or value."""
        t = part.tokens
        super().forward(
            layer,
            query[t],
            None if key is None else key[t],
            None if value is None else value[t],
            cache,
            part.inner,
            output[t],
            *scales,
        )
