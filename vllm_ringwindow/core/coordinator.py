# SPDX-License-Identifier: Apache-2.0
"""Asks nobody about a request that needs nothing.

vLLM's coordinator asks every group's manager four times per request and step. In decode
the answers change a few times per block: when the request grows, when a window leaves a
block behind, when a block is full and is hashed. In between the request *rests*.
"""

import sys
from functools import cache

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SingleTypeKVCacheManager,
)
from vllm.v1.request import Request

from vllm_ringwindow.core.manager import Rest, RingBlockManager

logger = init_logger("vllm.ringwindow")


class RestingCoordinator(KVCacheCoordinator):
    """Goes before the class of vLLM's coordinator: :func:`let_requests_rest`."""

    _rests: dict[str, Rest]

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, *args, **kwargs
    ) -> None:
        rest = self._rests.get(request_id)
        if rest is None or processed_computed_tokens >= rest.leaves:
            self._rests.pop(request_id, None)
            super().remove_skipped_blocks(
                request_id, processed_computed_tokens, *args, **kwargs
            )

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args, **kwargs
    ) -> int:
        rest = self._rests.get(request_id)
        if rest is not None and num_tokens <= rest.slots:
            return 0
        return super().get_num_blocks_to_allocate(
            request_id, num_tokens, *args, **kwargs
        )

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, *args, **kwargs
    ) -> tuple[list[KVCacheBlock], ...]:
        rest = self._rests.get(request_id)
        if rest is not None and num_tokens <= rest.slots:
            return tuple([[] for _ in self.single_type_managers])
        new_blocks = super().allocate_new_blocks(
            request_id, num_tokens, *args, **kwargs
        )
        self._note(request_id)
        return new_blocks

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        rest = self._rests.get(request.request_id)
        if rest is None or num_computed_tokens >= rest.fills:
            super().cache_blocks(request, num_computed_tokens)
            self._note(request.request_id)

    def free(self, request_id: str) -> None:
        self._rests.pop(request_id, None)
        super().free(request_id)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._rests.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def _note(self, request_id: str) -> None:
        """The request rests as long as every group lets it."""
        rests = []
        for manager in self.single_type_managers:
            rest = _rest(manager, request_id)
            if rest is None:
                self._rests.pop(request_id, None)
                return
            rests.append(rest)
        self._rests[request_id] = Rest(*map(min, zip(*rests)))


def _rest(manager: SingleTypeKVCacheManager, request_id: str) -> Rest | None:
    if isinstance(manager, RingBlockManager):
        return manager.rest(request_id)
    # Full attention keeps every block.
    fills = sys.maxsize
    if manager.enable_caching:
        fills = (manager.num_cached_block.get(request_id, 0) + 1) * manager.block_size
        if manager.block_size != manager.block_pool.hash_block_size:
            fills = 0  # a prompt's tail may be hashed in mid-block: always ask
    slots = len(manager.req_to_blocks[request_id]) * manager.block_size
    return Rest(slots=slots, leaves=sys.maxsize, fills=fills)


@cache
def _resting(coordinator: type[KVCacheCoordinator]) -> type[KVCacheCoordinator]:
    return type(f"Resting{coordinator.__name__}", (RestingCoordinator, coordinator), {})


def let_requests_rest(coordinator: KVCacheCoordinator) -> None:
    """For a coordinator of rings and full attention only; another stays as it is."""
    managers = coordinator.single_type_managers
    kinds = {type(manager) for manager in managers}
    rings = [m for m in managers if isinstance(m, RingBlockManager)]
    if not rings or not rings[0].kv_cache_spec.ring.rest:
        return
    if others := kinds - {RingBlockManager, FullAttentionManager}:
        names = ", ".join(sorted(kind.__name__ for kind in others))
        logger.info_once(
            "ring: every group is asked in every step, as in stock: "
            "the model has groups of %s",
            names,
        )
        return
    coordinator.__class__ = _resting(type(coordinator))  # type: ignore[arg-type]
    assert isinstance(coordinator, RestingCoordinator)
    coordinator._rests = {}
