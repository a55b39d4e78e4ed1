# SPDX-License-Identifier: Apache-2.0
"""The ring around vLLM's FlashAttention. Not yet run on a GPU."""

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from vllm_ringwindow.attention.backend import RingBackendMixin
from vllm_ringwindow.attention.builder import RingMetadataBuilder
from vllm_ringwindow.attention.impl import RingImplMixin


class RingFlashMetadataBuilder(RingMetadataBuilder):
    inner_builder_cls = FlashAttentionMetadataBuilder


class RingFlashImpl(RingImplMixin, FlashAttentionImpl):
    pass


class RingFlashBackend(RingBackendMixin, FlashAttentionBackend):
    """``FLASH_ATTN`` with sliding-window layers on rings; see ``RingCPUBackend``."""

    inner = FlashAttentionBackend

    @staticmethod
    def get_impl_cls() -> type[RingFlashImpl]:
        return RingFlashImpl

    @staticmethod
    def get_builder_cls() -> type[RingFlashMetadataBuilder]:
        return RingFlashMetadataBuilder
