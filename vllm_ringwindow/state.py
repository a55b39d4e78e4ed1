# SPDX-License-Identifier: Apache-2.0
"""What a running engine's rings hold, as plain data. Never prompt content.

Runs in the engine core, between two steps. ``endpoint`` serves it over HTTP, the
command line draws it.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm_ringwindow import report
from vllm_ringwindow.core.manager import RingBlockManager
from vllm_ringwindow.geometry import window_base

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def ring_managers(scheduler: "Scheduler") -> list[RingBlockManager]:
    """The managers of the groups that are on rings."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return [m for m in managers if isinstance(m, RingBlockManager)]


def engine_state(scheduler: "Scheduler") -> dict[str, Any]:
    """The decision, every ring group and every request that holds blocks."""
    config = scheduler.kv_cache_manager.kv_cache_config
    pool = scheduler.kv_cache_manager.block_pool
    managers = ring_managers(scheduler)
    return {
        "model": scheduler.vllm_config.model_config.model,
        "decision": report.decision(scheduler.vllm_config, config),
        "staging_bytes": report.staging_bytes(scheduler.vllm_config, config),
        "pool_blocks": pool.num_gpu_blocks,
        "free_blocks": pool.get_num_free_blocks(),
        "groups": [
            {
                "group": manager.kv_cache_group_id,
                "layers": len(
                    config.kv_cache_groups[manager.kv_cache_group_id].layer_names
                ),
                "window": manager.sliding_window,
                "block_size": manager.block_size,
                "ring_blocks": manager.num_ring_blocks,
                "rings": manager.num_rings,
                **asdict(manager.counts),
            }
            for manager in managers
        ],
        "requests": [
            {
                "id": request_id,
                "status": request.status.name.lower(),
                "computed_tokens": request.num_computed_tokens,
                "tokens": request.num_tokens,
                "ring_blocks": [m.num_held(request_id) for m in managers],
            }
            for request_id, request in scheduler.requests.items()
        ],
    }


def request_state(scheduler: "Scheduler", request_id: str) -> dict[str, Any] | None:
    """One request's rings, slot by slot; None if the engine has no such request.

    A slot is a logical block's place in the ring, ``logical % R``. In theory it holds
    the last logical block of the request that belongs there. ``wrong`` says why it
    does not, if the block is still in the window.
    """
    request = scheduler.requests.get(request_id)
    if request is None:
        return None
    groups = []
    for manager in ring_managers(scheduler):
        held = manager.held_blocks(request_id)
        base = window_base(
            request.num_computed_tokens, manager.sliding_window, manager.block_size
        )
        end = manager.num_logical(request_id)
        owners: dict[int, int] = {}
        for logical in sorted(held):
            owners.setdefault(held[logical].block_id, logical)
        slots = []
        for slot in range(manager.num_ring_blocks):
            # The last logical block below ``end`` that belongs here.
            logical = end - 1 - (end - 1 - slot) % manager.num_ring_blocks
            if logical < 0:
                continue
            block = held.pop(logical, None)
            wrong = None
            if block is None and logical >= base:
                wrong = "in the window, but without a block"
            elif block is not None and owners[block.block_id] != logical:
                wrong = f"its block also holds {owners[block.block_id]}"
            slots.append(_slot(manager, slot, logical, block, wrong))
        # Shared with other requests or kept for a prefix, until the next step.
        others = [
            _slot(manager, logical % manager.num_ring_blocks, logical, block, None)
            for logical, block in held.items()
        ]
        groups.append(
            {
                "group": manager.kv_cache_group_id,
                "window": manager.sliding_window,
                "block_size": manager.block_size,
                "ring_blocks": manager.num_ring_blocks,
                "base": base,
                "slots": slots,
                "others": others,
            }
        )
    return {
        "id": request_id,
        "status": request.status.name.lower(),
        "computed_tokens": request.num_computed_tokens,
        "tokens": request.num_tokens,
        "groups": groups,
    }


def _slot(manager, slot: int, logical: int, block, wrong: str | None) -> dict:
    size = manager.block_size
    return {
        "slot": slot,
        "logical_block": logical,
        "positions": [logical * size, (logical + 1) * size - 1],
        "block": None if block is None else block.block_id,
        "hashed": block is not None and block.block_hash is not None,
        "wrong": wrong,
    }
