# SPDX-License-Identifier: Apache-2.0
"""One layer's worth of K/V scratch, shared by all ring layers of one shape."""

import weakref

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_ringwindow.geometry import cdiv

logger = init_logger("vllm.ringwindow.staging")


def staging_blocks(vllm_config: VllmConfig, window: int, block_size: int) -> int:
    """Blocks that hold the longest chunk of one request with its context.

    More and shorter prefills in a step are processed in groups of rows that fit.
    """
    chunk = vllm_config.scheduler_config.max_num_batched_tokens
    longest = vllm_config.model_config.max_model_len
    return min(cdiv(window + chunk - 2, block_size) + 1, cdiv(longest, block_size))


def sharing_targets(vllm_config: VllmConfig) -> set[str]:
    """Layers whose KV cache other layers read (Gemma 3n and Gemma 4)."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    targets = (getattr(x, "kv_sharing_target_layer_name", None) for x in layers)
    return {target for target in targets if target is not None}


class Staging:
    """A flat, zero-initialised buffer that is viewed as blocks of a KV cache.

    Zeros because attention kernels multiply masked values by zero, and a NaN left in
    fresh memory would survive that. Held by the layers that use it: it dies with
    the model.
    """

    _shared: "weakref.WeakValueDictionary[tuple, Staging]"
    _shared = weakref.WeakValueDictionary()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer = torch.zeros(0, dtype=torch.uint8, device=device)

    @classmethod
    def shared(cls, key: tuple, device: torch.device) -> "Staging":
        """The staging of all layers with the same ``key`` in this process."""
        staging = cls._shared.get(key)
        if staging is None:
            staging = cls._shared[key] = cls(device)
        return staging

    def reserve(self, num_bytes: int) -> None:
        """Make the buffer at least ``num_bytes`` long; what it holds stays.

        It may grow between two passes of a step, whose first pass a sharing layer has
        yet to read (H8).
        """
        missing = num_bytes - self.buffer.numel()
        if missing > 0:
            more = torch.zeros(missing, dtype=torch.uint8, device=self.device)
            self.buffer = torch.cat((self.buffer, more))

    def as_blocks_of(self, kv_cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """View as ``[num_blocks, *kv_cache.shape[1:]]``, dims in the cache's order."""
        block_bytes = kv_cache[0].numel() * kv_cache.element_size()
        if num_blocks * block_bytes > self.buffer.numel():
            logger.warning_once(
                "ring: staging grows from %d to %d bytes after start-up; it was sized "
                "for a smaller block or chunk",
                self.buffer.numel(),
                num_blocks * block_bytes,
            )
            self.reserve(num_blocks * block_bytes)
        flat = self.buffer[: num_blocks * block_bytes].view(kv_cache.dtype)
        inner = kv_cache[0]
        order = sorted(range(inner.dim()), key=inner.stride, reverse=True)
        blocks = flat.view(num_blocks, *(inner.shape[d] for d in order))
        return blocks.permute(0, *(1 + order.index(d) for d in range(inner.dim())))
