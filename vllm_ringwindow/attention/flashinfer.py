# SPDX-License-Identifier: Apache-2.0
"""The ring around vLLM's FlashInfer. Not yet run on a GPU."""

from vllm.v1.attention.backends.flashinfer import (
    FlashInferBackend,
    FlashInferImpl,
    FlashInferMetadataBuilder,
)

from vllm_ringwindow.attention.builder import RingMetadataBuilder
from vllm_ringwindow.attention.impl import RingImplMixin


class RingFlashInferMetadataBuilder(RingMetadataBuilder):
    inner_builder_cls = FlashInferMetadataBuilder


class RingFlashInferImpl(RingImplMixin, FlashInferImpl):
    pass


class RingFlashInferBackend(FlashInferBackend):
    """``FLASHINFER`` with sliding-window layers on rings; see ``RingCPUBackend``."""

    inner = FlashInferBackend
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[RingFlashInferImpl]:
        return RingFlashInferImpl

    @staticmethod
    def get_builder_cls() -> type[RingFlashInferMetadataBuilder]:
        return RingFlashInferMetadataBuilder
