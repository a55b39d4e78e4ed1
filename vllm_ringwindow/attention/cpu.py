# SPDX-License-Identifier: Apache-2.0
"""The ring around vLLM's CPU attention."""

from vllm.utils.torch_utils import get_dtype_size, kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from vllm_ringwindow.attention.builder import RingMetadataBuilder
from vllm_ringwindow.attention.impl import RingImplMixin


class RingCPUMetadataBuilder(RingMetadataBuilder):
    inner_builder_cls = CPUAttentionMetadataBuilder


class RingCPUImpl(RingImplMixin, CPUAttentionBackendImpl):
    @property
    def ring_window(self) -> int:
        return self.sliding_window

    def kv_bytes_per_token(self) -> int:
        dtype = kv_cache_dtype_str_to_dtype(
            self.kv_cache_dtype, self._vllm_config.model_config
        )
        return 2 * self.num_kv_heads * self.head_size * get_dtype_size(dtype)


class RingCPUBackend(CPUAttentionBackend):
    """``CPU_ATTN`` with sliding-window layers on rings.

    Keeps the inner backend's name: parts of vLLM compare it with built-in names.
    ``inner`` marks it as a ring.
    """

    inner = CPUAttentionBackend
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[RingCPUImpl]:
        return RingCPUImpl

    @staticmethod
    def get_builder_cls() -> type[RingCPUMetadataBuilder]:
        return RingCPUMetadataBuilder
