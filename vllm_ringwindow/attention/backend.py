# SPDX-License-Identifier: Apache-2.0
"""What a ring backend answers for its layers.

vLLM with the source patches of ``patches/`` asks these methods itself; for any other,
``compat`` does.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import AttentionSpec, SlidingWindowSpec

from vllm_ringwindow import policy
from vllm_ringwindow.core.spec import RingParams, RingWindowSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger("vllm.ringwindow")


class RingBackendMixin:
    """Goes before the inner backend's class."""

    forward_includes_kv_cache_update = True
    # vLLM 0.33: a fused kernel that writes K/V before forward() would not stage them.
    supports_kv_cache_update_bypass = False

    @classmethod
    def select_for_layer(
        cls,
        attn_selector_config: "AttentionSelectorConfig",
        platform_choice: Callable[[AttentionBackendEnum | None], str],
    ) -> str:
        return policy.route_layer(attn_selector_config, platform_choice)

    @classmethod
    def finish_layer_spec(
        cls, spec: AttentionSpec, layer: Any, vllm_config: "VllmConfig"
    ) -> AttentionSpec:
        """The layer's ring spec, staging reserved; ``spec`` if it passes through."""
        if type(spec) is not SlidingWindowSpec:
            return spec
        if reason := policy.pass_through_reason(vllm_config):
            logger.info_once("ring: sliding-window layers pass through: %s", reason)
            return spec
        ring = RingParams.from_config(vllm_config)
        ring_spec = RingWindowSpec.from_sliding_window(spec, ring)
        layer.impl.reserve_staging(ring_spec)
        return ring_spec
