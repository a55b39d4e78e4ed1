# SPDX-License-Identifier: Apache-2.0
"""The ring around vLLM's FlashInfer. Not yet run on a GPU.

FlashInfer plans a pass on the host: page counts come from ``seq_lens_cpu_upper_bound``
(exact without speculation), which views rebase like the device's lengths; page indices
are copied on the device from the view's table. With speculation vLLM's builder reads
``seq_lens`` back, as in stock, once for each in-place pass; for staged passes it does
not have to.

Only the wrappers of pages (``Batch{Prefill,Decode}WithPagedKVCacheWrapper``) are meant
here. Where vLLM would choose the XQA or TRTLLM-gen kernels instead, which no CPU can
stand in for, ``policy.kernel_reason`` passes the layers through.
"""

from vllm.v1.attention.backends.flashinfer import (
    FlashInferBackend,
    FlashInferImpl,
    FlashInferMetadataBuilder,
)

from vllm_ringwindow.attention.backend import RingBackendMixin
from vllm_ringwindow.attention.builder import RingMetadataBuilder
from vllm_ringwindow.attention.impl import RingImplMixin


class RingFlashInferMetadataBuilder(RingMetadataBuilder):
    inner_builder_cls = FlashInferMetadataBuilder

    def make_pass_builder(self, staged: bool) -> FlashInferMetadataBuilder:
        inner = FlashInferMetadataBuilder(*self._inner_args)
        # Passes run one after the other and what a plan must keep is in its wrapper:
        # they share the workspace (394 MiB and more).
        inner.set_workspace_buffer(self.in_place_builder._get_workspace_buffer())
        # Never captured. A graph's wrapper is made for each batch size, and the decodes
        # of a mixed step, which nobody pads, would come in all of them.
        inner.enable_cuda_graph = False
        if staged:
            # Rows of a staged pass have exact lengths on the host, drafts or not.
            inner._num_speculative_tokens = 0
        return inner


class RingFlashInferImpl(RingImplMixin, FlashInferImpl):
    pass


class RingFlashInferBackend(RingBackendMixin, FlashInferBackend):
    """``FLASHINFER`` with sliding-window layers on rings; see ``RingCPUBackend``."""

    inner = FlashInferBackend

    @staticmethod
    def get_impl_cls() -> type[RingFlashInferImpl]:
        return RingFlashInferImpl

    @staticmethod
    def get_builder_cls() -> type[RingFlashInferMetadataBuilder]:
        return RingFlashInferMetadataBuilder
