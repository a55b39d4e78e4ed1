# SPDX-License-Identifier: Apache-2.0
"""What was decided at start-up, in lines that a person understands."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from vllm_ringwindow import policy
from vllm_ringwindow.attention.staging import staging_blocks
from vllm_ringwindow.core.spec import RingWindowSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.ringwindow")


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _first_spec(spec: KVCacheSpec) -> KVCacheSpec:
    return next(iter(iter_layer_specs(spec)))


def ring_lines(config: KVCacheConfig) -> list[str]:
    """One line per ring geometry: layers, groups, W, block size, R."""
    geometries: dict[tuple[int, int, int], list[int]] = {}
    for group in config.kv_cache_groups:
        spec = _first_spec(group.kv_cache_spec)
        if isinstance(spec, RingWindowSpec):
            key = (spec.sliding_window, spec.block_size, spec.num_ring_blocks)
            geometries.setdefault(key, []).append(len(group.layer_names))
    return [
        f"on rings: {_count(sum(layers), 'layer')} in {_count(len(layers), 'group')}, "
        f"window {window} tokens, block size {block_size}, R = {ring} blocks "
        f"({ring * block_size} tokens) per request and group"
        for (window, block_size, ring), layers in geometries.items()
    ]


def other_lines(vllm_config: "VllmConfig", config: KVCacheConfig) -> list[str]:
    """One line per reason for layers that are not on rings."""
    reasons: dict[str, int] = {}
    for group in config.kv_cache_groups:
        spec = _first_spec(group.kv_cache_spec)
        if isinstance(spec, RingWindowSpec):
            continue
        for name in group.layer_names:
            reason = _why_not(vllm_config, name, group.kv_cache_spec)
            reasons[reason] = reasons.get(reason, 0) + 1
    return [
        f"not on rings: {_count(number, 'layer')}: {why}"
        for why, number in reasons.items()
    ]


def _why_not(vllm_config: "VllmConfig", name: str, group_spec: KVCacheSpec) -> str:
    layer_specs = getattr(group_spec, "kv_cache_specs", {})
    spec = layer_specs.get(name, group_spec)
    if isinstance(spec, FullAttentionSpec):
        if spec.sliding_window is None:
            return "full attention, paged growth as in stock vLLM"
        return (
            "the hybrid KV cache manager is off, so full and sliding-window layers "
            "share one growing block table"
        )
    if isinstance(spec, SlidingWindowSpec):
        return (
            policy.pass_through_reason(vllm_config)
            or "sliding window passed through to stock (see the worker's log)"
        )
    return f"{type(spec).__name__}, passed through to stock"


def blocks_per_request(
    vllm_config: "VllmConfig", config: KVCacheConfig
) -> tuple[int, int]:
    """Most blocks a request of max_model_len must hold: with rings, and in stock."""
    in_flight = vllm_config.max_in_flight_tokens
    longest = vllm_config.model_config.max_model_len
    ring = stock = 0
    for group in config.kv_cache_groups:
        spec = _first_spec(group.kv_cache_spec)
        held = -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes)
        ring += held
        if isinstance(spec, RingWindowSpec):
            stock += spec.stock_admission_blocks_per_request(in_flight, longest)
        else:
            stock += held
    return ring, stock


def staging_bytes(vllm_config: "VllmConfig", config: KVCacheConfig) -> int:
    """Bytes of staging per worker: one buffer per layer shape."""
    per_shape: dict[tuple, int] = {}
    for group in config.kv_cache_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            if isinstance(spec, RingWindowSpec):
                shape = (spec.num_kv_heads, spec.head_size, spec.dtype)
                blocks = staging_blocks(
                    vllm_config, spec.sliding_window, spec.block_size
                )
                size = blocks * spec.unpadded_page_size_bytes
                per_shape[shape] = max(size, per_shape.get(shape, 0))
    return sum(per_shape.values())


def decision(vllm_config: "VllmConfig", config: KVCacheConfig) -> list[str]:
    """The start-up report: what is on rings, what is not and why, what it saves."""
    lines = ring_lines(config)
    if not lines:
        lines = ["NOT in use: no layer of this model is on a ring"]
    lines += other_lines(vllm_config, config)
    if any(
        isinstance(_first_spec(g.kv_cache_spec), AttentionSpec)
        for g in config.kv_cache_groups
    ):
        ring, stock = blocks_per_request(vllm_config, config)
        block_bytes = max(t.size for t in config.kv_cache_tensors) / config.num_blocks
        lines.append(
            f"KV per request of {vllm_config.model_config.max_model_len} tokens: "
            f"{mib(ring * block_bytes)} ({ring} blocks), stock "
            f"{mib(stock * block_bytes)} ({stock} blocks); staging "
            f"{mib(staging_bytes(vllm_config, config))} per worker"
        )
    return lines


def log_decision(vllm_config: "VllmConfig", config: KVCacheConfig) -> None:
    for line in decision(vllm_config, config):
        logger.info("ring: %s", line)
