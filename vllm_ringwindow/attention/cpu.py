# SPDX-License-Identifier: Apache-2.0
"""The ring around vLLM's CPU attention."""

from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from vllm_ringwindow.attention.backend import RingBackendMixin
from vllm_ringwindow.attention.builder import RingMetadataBuilder
from vllm_ringwindow.attention.impl import RingImplMixin


class RingCPUMetadataBuilder(RingMetadataBuilder):
    inner_builder_cls = CPUAttentionMetadataBuilder


class RingCPUImpl(RingImplMixin, CPUAttentionBackendImpl):
    pass


class RingCPUBackend(RingBackendMixin, CPUAttentionBackend):
    """``CPU_ATTN`` with sliding-window layers on rings.

    Keeps the inner backend's name: parts of vLLM compare it with built-in names.
    ``inner`` marks it as a ring.
    """

    inner = CPUAttentionBackend

    @staticmethod
    def get_impl_cls() -> type[RingCPUImpl]:
        return RingCPUImpl

    @staticmethod
    def get_builder_cls() -> type[RingCPUMetadataBuilder]:
        return RingCPUMetadataBuilder
