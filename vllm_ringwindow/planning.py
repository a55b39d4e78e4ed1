# SPDX-License-Identifier: Apache-2.0
"""How many requests fit, from a model's config alone.

The model is built on the meta device, so that every layer says what an engine's would,
and vLLM's own planner divides the memory: three times, for stock, stock with the hybrid
KV cache manager off, and the ring. No weights are read and nothing is allocated.
"""

import contextlib
import copy
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from vllm_ringwindow import report
from vllm_ringwindow.compat import plan_kv_cache
from vllm_ringwindow.core.spec import RingWindowSpec
from vllm_ringwindow.geometry import cdiv

STOCK, HYBRID_OFF, RING = MODES = ("stock", "hybrid off", "ring")

Specs = dict[str, KVCacheSpec]


@dataclass(frozen=True)
class Fit:
    """What one mode makes of a memory. None where the engine would not start."""

    tokens: int | None  # vLLM's "KV cache size"
    concurrency: float | None  # vLLM's "Maximum concurrency", at max_model_len
    blocks: int | None
    least_bytes: int  # of KV memory, with which it starts


@dataclass(frozen=True)
class Plan:
    """The answer of :func:`plan`; ``asdict`` makes JSON of it."""

    model: str
    max_model_len: int
    batched_tokens: int
    batches_in_flight: int
    prefix_caching: bool
    kv_bytes: int | None
    block_bytes: int
    staging_bytes: int
    layers: list[dict[str, Any]]  # by kind
    groups: list[dict[str, Any]]
    decision: list[str]  # what the engine will log
    per_request: list[dict[str, int]]  # bytes by length, stock / hybrid off / ring
    fits: dict[str, Fit]
    advice: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def engine_config(args: EngineArgs) -> VllmConfig:
    """vLLM's configuration; no tokenizer, weights or free memory are looked for.

    Raises:
        ValueError: vLLM refuses the options, or the plugin does.
    """
    args = copy.deepcopy(args)
    args.skip_tokenizer_init = True
    args.kv_cache_memory_bytes = args.kv_cache_memory_bytes or 1 << 30
    with contextlib.redirect_stdout(sys.stderr):
        return args.create_engine_config()


def layer_specs(args: EngineArgs) -> tuple[Specs, VllmConfig]:
    """What each layer of the whole model asks of the planner, on one rank.

    Returns:
        The specs, and the configuration once a worker and the engine core would have
        settled block size and cache layout.
    """
    from vllm.distributed.kv_transfer.kv_connector.utils import (
        get_current_attn_backends,
    )
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends import utils
    from vllm.v1.worker.utils import customize_attention_spec

    args = copy.deepcopy(args)
    args.tensor_parallel_size = args.pipeline_parallel_size = 1
    args.data_parallel_size = 1
    config = engine_config(args)
    with (
        contextlib.redirect_stdout(sys.stderr),
        _one_rank(config),
        _no_shared_modules(),
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("meta"),
    ):
        initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        specs: Specs = {}
        for name, layer in config.compilation_config.static_forward_context.items():
            if not isinstance(layer, AttentionLayerBase):
                continue
            if isinstance(layer, Attention) and layer.kv_sharing_target_layer_name:
                continue
            if spec := layer.get_kv_cache_spec(config):
                if isinstance(spec, AttentionSpec):
                    spec = customize_attention_spec(layer.get_attn_backend(), spec)
                specs[name] = spec
        backends = get_current_attn_backends(config)
        layouts = [x.name for x in utils.get_supported_kv_cache_layouts(backends)]
        utils.resolve_kv_cache_layout(config, [layouts], specs.values())
    return specs, config


@contextlib.contextmanager
def _one_rank(config: VllmConfig) -> Iterator[None]:
    """vLLM's layers ask for their process groups: one process, talking to nobody."""
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        with set_current_vllm_config(config):
            yield
        return
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            1, 0, f"file://{folder}/store", 0, "gloo"
        )
        parallel_state.ensure_model_parallel_initialized(1, 1)
        try:
            yield
        finally:
            parallel_state.cleanup_dist_env_and_memory()


@contextlib.contextmanager
def _no_shared_modules() -> Iterator[None]:
    """vLLM keeps rotary embeddings for later models, which must get none of ours."""
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    kept = dict(_ROPE_DICT)
    _ROPE_DICT.clear()
    try:
        yield
    finally:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(kept)


def per_rank(specs: Specs, config: VllmConfig) -> list[Specs]:
    """Divide one rank's layers and heads among the ranks of tensor and pipeline."""
    from vllm.distributed.utils import get_pp_indices
    from vllm.model_executor.models.utils import extract_layer_index

    parallel = config.parallel_config
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size

    def part(spec: KVCacheSpec) -> KVCacheSpec:
        if not isinstance(spec, AttentionSpec) or tensor == 1:
            return spec
        return replace(spec, num_kv_heads=max(1, spec.num_kv_heads // tensor))

    layers = config.model_config.get_total_num_hidden_layers()
    ranks = []
    for rank in range(pipeline):
        first, last = get_pp_indices(layers, rank, pipeline)
        ranks += [
            {
                name: part(spec)
                for name, spec in specs.items()
                if pipeline == 1 or first <= extract_layer_index(name) < last
            }
        ] * tensor
    return ranks


def as_stock(specs: Specs) -> Specs:
    """The same layers without rings."""
    return {
        name: spec.as_sliding_window() if isinstance(spec, RingWindowSpec) else spec
        for name, spec in specs.items()
    }


def kv_cache_config(
    config: VllmConfig, ranks: list[Specs], kv_bytes: int
) -> KVCacheConfig | None:
    """What vLLM's planner makes of ``kv_bytes`` per rank; None if it does not start."""
    try:
        planned = plan_kv_cache(
            config, [dict(specs) for specs in ranks], [kv_bytes] * len(ranks)
        )
    except ValueError as error:
        if "at least one request" not in str(error) and "No available" not in str(
            error
        ):
            raise
        return None
    return kv_cache_utils.generate_scheduler_kv_cache_config(planned)


def plan(args: EngineArgs, kv_bytes: int | None = None) -> Plan:
    """Everything ``vllm-ringwindow plan`` tells.

    Args:
        args: vLLM's engine options; the attention backend is taken to be the ring.
        kv_bytes: KV cache memory per rank, or None.

    Raises:
        ValueError: vLLM or the plugin refuses the options, or cannot read the model.
    """
    args = copy.deepcopy(args)
    if not args.attention_backend and not args.attention_config.backend_per_kind:
        args.attention_backend = "RING"  # type: ignore[assignment]
    config = engine_config(args)
    specs, built = layer_specs(args)
    config.cache_config = built.cache_config
    if not any(isinstance(spec, AttentionSpec) for spec in specs.values()):
        raise ValueError(f"{args.model}: no attention layer with a KV cache")
    ranks = {
        RING: per_rank(specs, config),
        STOCK: per_rank(as_stock(specs), config),
    }
    ranks[HYBRID_OFF] = ranks[STOCK]
    plenty = _plenty(config, specs)
    ring = _planned(config, ranks[RING], RING, plenty)
    assert ring is not None, "more than enough memory is enough"
    fits = {mode: _fit(config, ranks[mode], mode, kv_bytes, plenty) for mode in MODES}
    lengths = _lengths(config)
    per_request = [
        {"tokens": length}
        | {mode: _request_bytes(config, ranks[mode], mode, length) for mode in MODES}
        for length in lengths
    ]
    return Plan(
        model=str(args.model),
        max_model_len=config.model_config.max_model_len,
        batched_tokens=config.scheduler_config.max_num_batched_tokens,
        batches_in_flight=config.max_concurrent_batches,
        prefix_caching=bool(config.cache_config.enable_prefix_caching),
        kv_bytes=kv_bytes,
        block_bytes=_block_bytes(ring),
        staging_bytes=report.staging_bytes(config, ring),
        layers=_layer_kinds(ranks[RING][0]),
        groups=_groups(ring),
        decision=report.decision(config, ring),
        per_request=per_request,
        fits=fits,
        advice=_advice(config, specs, per_request[-1], fits),
    )


@contextlib.contextmanager
def _mode(config: VllmConfig, mode: str) -> Iterator[None]:
    scheduler = config.scheduler_config
    before = scheduler.disable_hybrid_kv_cache_manager
    if mode == HYBRID_OFF:
        scheduler.disable_hybrid_kv_cache_manager = True
    try:
        yield
    finally:
        scheduler.disable_hybrid_kv_cache_manager = before


def _planned(
    config: VllmConfig, ranks: list[Specs], mode: str, kv_bytes: int
) -> KVCacheConfig | None:
    with _mode(config, mode):
        return kv_cache_config(config, ranks, kv_bytes)


def _plenty(config: VllmConfig, specs: Specs) -> int:
    """More bytes than one request can need in any mode."""
    longest = config.model_config.max_model_len + config.max_in_flight_tokens
    blocks = cdiv(longest, min(s.block_size for s in specs.values())) + 100
    return 2 * blocks * sum(spec.page_size_bytes for spec in specs.values())


def _block_bytes(planned: KVCacheConfig) -> int:
    return sum(t.size for t in planned.kv_cache_tensors) // planned.num_blocks


def _fit(
    config: VllmConfig,
    ranks: list[Specs],
    mode: str,
    kv_bytes: int | None,
    plenty: int,
) -> Fit:
    # The least memory that starts, by asking the planner: to one block.
    planned = _planned(config, ranks, mode, plenty)
    assert planned is not None
    step = _block_bytes(planned)
    low, high = 0, plenty // step + 1
    while high - low > 1:
        middle = (low + high) // 2
        if _planned(config, ranks, mode, middle * step) is None:
            low = middle
        else:
            high = middle
    planned = kv_bytes and _planned(config, ranks, mode, kv_bytes) or None
    if planned is None:
        return Fit(None, None, None, high * step)
    with _mode(config, mode):
        tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(config, planned)
    return Fit(tokens, concurrency, planned.num_blocks, high * step)


def _request_bytes(
    config: VllmConfig, ranks: list[Specs], mode: str, length: int
) -> int:
    """What the engine reserves for a request of ``length`` tokens."""
    model = config.model_config
    before = model.max_model_len
    model.max_model_len = length
    try:
        return _fit(config, ranks, mode, None, _plenty(config, ranks[0])).least_bytes
    finally:
        model.max_model_len = before


def _lengths(config: VllmConfig) -> list[int]:
    """Request lengths worth a row: powers of two up to max_model_len."""
    longest = config.model_config.max_model_len
    lengths = [n for n in (2**i for i in range(10, 21)) if n < longest]
    return [*lengths[-5:], longest]


def _layer_kinds(specs: Specs) -> list[dict[str, Any]]:
    kinds: dict[tuple, int] = {}
    for spec in specs.values():
        if isinstance(spec, RingWindowSpec):
            kind, window = "sliding window, on rings", spec.sliding_window
        elif isinstance(spec, SlidingWindowSpec):
            kind, window = "sliding window, not on rings", spec.sliding_window
        elif isinstance(spec, FullAttentionSpec):
            kind, window = "full attention", None
        else:
            kind, window = type(spec).__name__, None
        heads = getattr(spec, "num_kv_heads", None)
        size = getattr(spec, "head_size", None)
        key = (kind, window, heads, size, str(getattr(spec, "dtype", "")))
        kinds[key] = kinds.get(key, 0) + 1
    names = ("kind", "window", "kv_heads", "head_size", "dtype")
    return [dict(zip(names, key)) | {"layers": n} for key, n in kinds.items()]


def _groups(planned: KVCacheConfig) -> list[dict[str, Any]]:
    rows = []
    for number, group in enumerate(planned.kv_cache_groups):
        spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
        on_ring = isinstance(spec, RingWindowSpec)
        rows.append(
            {
                "group": number,
                "layers": len(group.layer_names),
                "block_size": spec.block_size,
                "window": getattr(spec, "sliding_window", None),
                "ring_blocks": spec.num_ring_blocks if on_ring else None,
            }
        )
    return rows


def _advice(
    config: VllmConfig, specs: Specs, longest: dict[str, int], fits: dict[str, Fit]
) -> str:
    """One sentence: use it, or do not bother, and why."""
    rings = [s for s in specs.values() if isinstance(s, RingWindowSpec)]
    if not rings:
        return "Do not bother: no layer of this model goes on a ring (see why above)."
    length = config.model_config.max_model_len
    window = max(spec.sliding_window for spec in rings)
    if length <= window:
        return (
            f"Do not bother: no request is longer than the window ({length} <= "
            f"{window} tokens), so the ring holds as much as stock."
        )
    if config.cache_config.enable_prefix_caching and _retains_everything(config):
        return (
            "Do not bother: with a dense prefix_cache_retention_interval every block "
            "is kept for other prompts and none can be recycled."
        )
    ratio = longest[STOCK] / longest[RING]
    if ratio < 1.05:
        return (
            f"Little to gain: a request of {length} tokens reserves about as much KV "
            "with the ring as without. It pays with longer contexts or larger "
            "max_num_batched_tokens."
        )
    start = ""
    ring, stock = fits[RING], fits[STOCK]
    if ring.concurrency is not None and stock.concurrency is None:
        start = "; stock does not start with this KV memory at all"
    return (
        f"Use it: a request of {length} tokens reserves {ratio:.2f} times less KV than "
        f"in stock{start}."
    )


def _retains_everything(config: VllmConfig) -> bool:
    return config.cache_config.prefix_cache_retention_interval is None
