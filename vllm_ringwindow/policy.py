# SPDX-License-Identifier: Apache-2.0
"""Which layers go on rings, which pass through to stock, what is refused.

One place decides, from the engine's configuration and a layer's traits; the start-up
report (``report``) prints what was decided and why.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_ringwindow.config import ring_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger("vllm.ringwindow")

BACKEND_NAME = "RING"
KIND = "sliding_window"

FLASHINFER = "vllm.v1.attention.backends.flashinfer.FlashInferBackend"

# Inner backend class path (what the platform chooses) -> its ring.
RING_BACKENDS = {
    "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend": (
        "vllm_ringwindow.attention.cpu.RingCPUBackend"
    ),
    "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend": (
        "vllm_ringwindow.attention.flash.RingFlashBackend"
    ),
    "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend": (
        "vllm_ringwindow.attention.triton.RingTritonBackend"
    ),
    FLASHINFER: "vllm_ringwindow.attention.flashinfer.RingFlashInferBackend",
}

# Rings that have run on the hardware they are for.
PROVEN = frozenset({"vllm_ringwindow.attention.cpu.RingCPUBackend"})

# Drafting methods tested on rings; others pass through.
SUPPORTED_DRAFTING = frozenset({"ngram", "draft_model", "eagle", "eagle3"})


def ring_requested(vllm_config: "VllmConfig") -> bool:
    """Whether the user asked for rings, globally or for sliding-window layers."""
    attention = vllm_config.attention_config
    backend = attention.backend_per_kind.get(KIND, attention.backend)
    return backend is not None and backend.name == BACKEND_NAME


def check_supported(vllm_config: "VllmConfig") -> None:
    """Refuse combinations that would be wrong, naming the option.

    Raises:
        ValueError: rings were asked for together with an option they cannot honour,
            or the plugin's own options are not what it knows.
    """
    ring_config(vllm_config)
    if not ring_requested(vllm_config):
        return
    if vllm_config.parallel_config.use_ubatching:
        raise ValueError(
            "--attention-backend ring cannot be combined with --enable-dbo (or "
            "--ubatch-size): micro-batching splits a prefill across two forwards and "
            "the ring has no blocks for what lies between. Drop one of the two options."
        )


def check_and_complete(vllm_config: "VllmConfig") -> None:
    """What is done to every configuration, once the platform has checked it."""
    check_supported(vllm_config)
    include_drafter(vllm_config)


def include_drafter(vllm_config: "VllmConfig") -> None:
    """Let the drafter's sliding-window layers go where the target's go.

    vLLM selects a drafter's backend anew; left alone they would form a group of their
    own beside the target's rings.
    """
    spec = vllm_config.speculative_config
    if (
        spec is not None
        and ring_requested(vllm_config)
        and spec.attention_backend is None
    ):
        spec.attention_backend = vllm_config.attention_config.backend


def pass_through_reason(vllm_config: "VllmConfig") -> str | None:
    """Why no layer of this engine goes on a ring, or None."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        return "--decode-context-parallel-size > 1"
    if parallel.prefill_context_parallel_size > 1:
        return "--prefill-context-parallel-size > 1"
    if vllm_config.attention_config.use_non_causal:
        return "non-causal attention"
    kv_transfer = vllm_config.kv_transfer_config
    if kv_transfer is not None and kv_transfer.is_kv_transfer_instance:
        return (
            f"--kv-transfer-config (connector {kv_transfer.kv_connector!r}): a "
            "connector may read a block after the ring has overwritten it"
        )
    return _drafting_reason(vllm_config)


def _drafting_reason(vllm_config: "VllmConfig") -> str | None:
    spec = vllm_config.speculative_config
    if spec is None:
        return None
    if spec.method not in SUPPORTED_DRAFTING:
        return f"speculative method {spec.method!r} is not supported on rings yet"
    kinds = getattr(vllm_config.model_config.hf_text_config, "layer_types", None) or ()
    if spec.method == "draft_model" and len(set(kinds)) > 1:
        return (
            "vLLM gives a draft model the block table of the first KV cache group, "
            "which is not its own beside a hybrid model: expect wrong outputs with "
            "rings and without"
        )
    return None


def selector_reason(config: "AttentionSelectorConfig") -> str | None:
    """Why a layer with these traits never goes on a ring, or None."""
    if not config.has_sliding_window:
        return "no sliding window"
    if config.attn_type != AttentionType.DECODER:
        return f"{AttentionType(config.attn_type).value} attention"
    if config.use_mla or config.use_sparse:
        return "MLA or sparse attention"
    if config.use_rswa:
        return "reference sliding window"
    dtype = config.kv_cache_dtype or ""
    # The kernel keeps scales in views of the first cache that it sees (H10); NVFP4 has
    # pages of its own making, only on GPUs.
    if "per_token_head" in dtype or dtype.startswith("nvfp4"):
        return f"--kv-cache-dtype {dtype}"
    if config.use_mm_prefix:
        return "multi-modal prefix attention, which is not supported on rings yet"
    return None


def kernel_reason(inner: str, vllm_config: "VllmConfig | None") -> str | None:
    """Why rings would be around kernels that no test stands in for, or None.

    Args:
        inner: path of the backend class that the platform chose.
        vllm_config: the engine's configuration, where it is known.
    """
    if inner != FLASHINFER:
        return None
    from vllm.utils.flashinfer import supports_trtllm_attention

    wanted = vllm_config and vllm_config.attention_config.use_trtllm_attention
    if wanted is False or not supports_trtllm_attention(is_prefill=False):
        return None
    return (
        "on this GPU FlashInfer uses XQA or TRTLLM-gen kernels, and rings around them "
        "are untested; with --attention-config.use_trtllm_attention=false it does not"
    )


def route_layer(
    config: "AttentionSelectorConfig",
    platform_choice: Callable[[AttentionBackendEnum | None], str],
) -> str:
    """The class path of one layer's backend, when rings were asked for.

    Args:
        config: The layer's traits.
        platform_choice: What the platform chooses, given a selected backend or None.
    """
    from vllm.config import get_current_vllm_config_or_none
    from vllm.platforms import current_platform

    inner = platform_choice(_chosen_beside_rings())
    if inner not in RING_BACKENDS and current_platform.is_rocm():
        inner = platform_choice(AttentionBackendEnum.TRITON_ATTN)
    reason = selector_reason(config)
    if reason is None and inner not in RING_BACKENDS:
        reason = f"no ring for {inner.rsplit('.', 1)[-1]} yet"
    if reason is None:
        reason = kernel_reason(inner, get_current_vllm_config_or_none())
    if reason is None:
        ring = RING_BACKENDS[inner]
        if ring not in PROVEN:
            logger.warning_once(
                "ring: rings on %s have not yet been run on a GPU; compare with stock "
                "before you rely on them: vllm-ringwindow verify MODEL",
                inner.rsplit(".", 1)[-1],
            )
        return ring
    if config.has_sliding_window:
        logger.info_once("ring: sliding-window layers pass through: %s", reason)
    return inner


def _chosen_beside_rings() -> AttentionBackendEnum | None:
    """The backend that the user chose for all other layers: rings are around it too."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    chosen = config and config.attention_config.backend
    return None if chosen is None or chosen.name == BACKEND_NAME else chosen


def routed_to_ring(layer: "Attention") -> bool:
    """Whether a built layer has a ring backend."""
    return layer.get_attn_backend().__module__.startswith("vllm_ringwindow.")
