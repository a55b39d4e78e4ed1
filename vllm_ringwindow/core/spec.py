# SPDX-License-Identifier: Apache-2.0
"""What one sliding-window layer's ring costs, in blocks and bytes."""

from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec

from vllm_ringwindow.config import ring_config
from vllm_ringwindow.geometry import cdiv, ring_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class RingParams(NamedTuple):
    """What a ring takes from the engine's configuration.

    Derived from ``vllm_config`` alone, so that every process agrees.
    """

    roll_back: int  # tokens between the oldest possible query and the newest slot
    prefix_caching: bool  # blocks may be shared, hence not recyclable for a step
    lookahead: int = 0  # the part of roll_back that drafters write ahead
    rest: bool = True  # RingConfig.rest
    check: bool = False  # RingConfig.check
    split: int = 1  # kernel blocks of one block

    @classmethod
    def from_config(cls, vllm_config: "VllmConfig") -> Self:
        config = ring_config(vllm_config)
        k = vllm_config.num_speculative_tokens
        # k drafts of every batch in flight may be rejected and a step has 1 + k query
        # tokens, but never more than the budget of the batches in flight; drafters
        # write num_lookahead_tokens further ahead.
        in_flight = min(
            k * vllm_config.max_concurrent_batches + (1 + k),
            vllm_config.max_in_flight_tokens,
        )
        return cls(
            roll_back=in_flight - 1 + vllm_config.num_lookahead_tokens,
            prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
            lookahead=vllm_config.num_lookahead_tokens,
            rest=config.rest,
            check=config.check,
        )


@dataclass(frozen=True, kw_only=True)
class RingWindowSpec(SlidingWindowSpec):
    """A sliding-window layer whose K/V live in a ring of ``num_ring_blocks``.

    No init fields of its own: with the hybrid manager off vLLM rebuilds every spec
    as ``FullAttentionSpec`` field by field, and ``dataclasses.replace`` is used all
    over the planner. What comes from the engine's configuration is therefore
    carried by the class: see :func:`ring_spec_class`.
    """

    ring: ClassVar[RingParams]

    @classmethod
    def from_sliding_window(cls, spec: SlidingWindowSpec, ring: RingParams) -> Self:
        """The ring twin of a stock sliding-window spec."""
        return ring_spec_class(ring)(**_init_fields(spec))

    def as_sliding_window(self) -> SlidingWindowSpec:
        """The stock spec of the same layer."""
        return SlidingWindowSpec(**_init_fields(self))

    @property
    def num_ring_blocks(self) -> int:
        """``R``: physical blocks that one request's ring holds in this group."""
        return ring_blocks(
            self.sliding_window,
            self.block_size,
            self.extra_retained_tokens + self.ring.roll_back,
        )

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Most blocks a request must hold at once: start-up size and admission cap.

        ``R`` with prefix caching off. With it on ``2R``, for the one step after a
        prefix hit: the hit's blocks are shared, so the step that reads them cannot
        recycle them. Blocks that prefix caching retains come on top only when the
        pool has them to spare. Never more than stock's own bound, nor than the
        request has logical blocks.

        Example: W=1024, block 16, 8192 batched tokens, two batches in flight, long
        contexts: stock 1089; ring 65 without prefix caching, 130 with it.
        """
        stock = super().max_admission_blocks_per_request(
            max_in_flight_tokens + self.ring.lookahead, max_model_len
        )
        held = self.num_ring_blocks * (2 if self.ring.prefix_caching else 1)
        return min(held, cdiv(max_model_len, self.block_size), stock)

    def stock_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """The bound stock vLLM would use for this layer (for reports)."""
        return super().max_admission_blocks_per_request(
            max_in_flight_tokens, max_model_len
        )

    def is_uniform_with_collection(
        self, kv_cache_specs: dict[str, KVCacheSpec]
    ) -> bool:
        """Ring and stock sliding-window layers never share a group."""
        return super().is_uniform_with_collection(kv_cache_specs) and all(
            type(spec) is type(self) for spec in kv_cache_specs.values()
        )

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """The worker's view of the layer, in kernel blocks smaller than blocks.

        ``R`` kernel blocks of this spec never exceed the ring's: the worker stages a
        chunk that the ring, in whole blocks, would have held.
        """
        if block_size == self.block_size:
            return self
        split = self.ring.split * (self.block_size // block_size)
        fields = _init_fields(super().copy_with_new_block_size(block_size))
        return ring_spec_class(self.ring._replace(split=split))(**fields)  # type: ignore[return-value]

    def __reduce__(self):
        return _rebuild, (self.ring, _init_fields(self))


def _init_fields(spec: SlidingWindowSpec) -> dict:
    return {f.name: getattr(spec, f.name) for f in fields(spec) if f.init}


def _rebuild(ring: RingParams, init_fields: dict) -> RingWindowSpec:
    return ring_spec_class(ring)(**init_fields)


@cache
def ring_spec_class(ring: RingParams) -> type[RingWindowSpec]:
    """The ``RingWindowSpec`` whose instances carry ``ring``, one class per value.

    ``dataclasses.replace`` and ``merge`` keep an instance's class, so the parameters
    survive the planner; ``__reduce__`` carries them across processes.
    """
    return type(
        RingWindowSpec.__name__,
        (RingWindowSpec,),
        {"ring": ring, "__module__": __name__, "__doc__": RingWindowSpec.__doc__},
    )
