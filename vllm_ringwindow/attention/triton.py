# SPDX-License-Identifier: Apache-2.0
"""The ring around vLLM's Triton attention (NVIDIA and ROCm). Not yet run on a GPU."""

from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_ringwindow.attention.backend import RingBackendMixin
from vllm_ringwindow.attention.builder import RingMetadataBuilder
from vllm_ringwindow.attention.impl import RingImplMixin


class RingTritonMetadataBuilder(RingMetadataBuilder):
    inner_builder_cls = TritonAttentionMetadataBuilder


class RingTritonImpl(RingImplMixin, TritonAttentionImpl):
    pass


class RingTritonBackend(RingBackendMixin, TritonAttentionBackend):
    """``TRITON_ATTN`` with sliding-window layers on rings; see ``RingCPUBackend``."""

    inner = TritonAttentionBackend

    @staticmethod
    def get_impl_cls() -> type[RingTritonImpl]:
        return RingTritonImpl

    @staticmethod
    def get_builder_cls() -> type[RingTritonMetadataBuilder]:
        return RingTritonMetadataBuilder
