# SPDX-License-Identifier: Apache-2.0
"""The attention layer's forward, around an inner impl."""

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl, AttentionLayer

from vllm_ringwindow.attention.metadata import PassThroughMetadata, RingMetadata
from vllm_ringwindow.attention.staging import Staging, staging_blocks


class RingImplMixin(AttentionImpl):
    """Put before an inner impl class: ``super()`` is the inner impl.

    The cache update happens in ``forward``: in a staged pass new K/V go to staging.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._vllm_config: VllmConfig = get_current_vllm_config()
        self._staging: Staging | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        self._reserve_staging()

    def _reserve_staging(self) -> None:
        """Allocate staging at model load, so that memory profiling counts it."""
        config = self._vllm_config
        block_size = config.cache_config.block_size
        window = self.ring_window
        num_tokens = block_size * staging_blocks(config, window, block_size)
        self.staging.reserve(num_tokens * self.kv_bytes_per_token())

    @property
    def ring_window(self) -> int:
        """The layer's own window (I10), in tokens."""
        raise NotImplementedError

    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that this layer stores per token."""
        raise NotImplementedError

    @property
    def staging(self) -> Staging:
        if self._staging is None:
            config = self._vllm_config
            key = (
                id(config.compilation_config),  # one set per loaded model
                self.num_kv_heads,
                self.head_size,
                self.kv_cache_dtype,
            )
            self._staging = Staging.shared(key, config.device_config.device)
        return self._staging

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

        assert layer.kv_sharing_target_layer_name is None, "H8: not on a ring yet"
        for staged in attn_metadata.staged:
            t = staged.tokens
            staging = self.staging.as_blocks_of(kv_cache, staged.num_blocks)
            staging[staged.copy_in_to] = kv_cache[staged.copy_in_from]
            self.do_kv_cache_update(layer, key[t], value[t], staging, staged.slots)
            super().forward(
                layer,
                query[t],
                key[t],
                value[t],
                staging,
                staged.inner,
                output[t],
                *scales,
            )
            kv_cache[staged.copy_out_to] = staging[staged.copy_out_from]
        for in_place in attn_metadata.in_place:
            t = in_place.tokens
            self.do_kv_cache_update(layer, key[t], value[t], kv_cache, in_place.slots)
            super().forward(
                layer,
                query[t],
                key[t],
                value[t],
                kv_cache,
                in_place.inner,
                output[t],
                *scales,
            )
        return output
