# SPDX-License-Identifier: Apache-2.0
"""All that touches vLLM internals which are not extension points.

One function per patch, listed in ``PATCHES``: target, why, how, upstream state, when
to remove it. Each is idempotent, keeps the original, and fails loudly if upstream
renamed its target.
"""

import copyreg
import functools
import inspect
import sys
from collections.abc import Callable
from typing import NamedTuple

from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_ringwindow import policy

logger = init_logger("vllm.ringwindow")

MARK = "_ringwindow_original"
STATS_KEY = "ringwindow"


class Patch(NamedTuple):
    """One entry of the catalogue."""

    name: str
    target: str
    why: str
    upstream: str
    remove_when: str
    apply: Callable[[], None]


def _wrap(owner: object, name: str, parameters: list[str], wrapper: Callable) -> None:
    """Replace ``owner.name`` by ``wrapper(original, ...)`` once.

    Raises:
        RuntimeError: the target is gone or takes other parameters than expected.
    """
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    static = inspect.getattr_static(owner, name, None)
    if static is None:
        raise RuntimeError(f"ringwindow: vLLM has no {where} any more")
    function = static.__func__ if isinstance(static, classmethod) else static
    if hasattr(function, MARK):
        return
    found = list(inspect.signature(function).parameters)
    if found[: len(parameters)] != parameters:
        raise RuntimeError(
            f"ringwindow: {where} takes {found}, expected it to begin with {parameters}"
        )

    @functools.wraps(function)
    def patched(*args, **kwargs):
        return wrapper(function, *args, **kwargs)

    setattr(patched, MARK, function)
    setattr(
        owner,
        name,
        classmethod(patched) if isinstance(static, classmethod) else patched,
    )


# -- the backend's name, and its pickling (H1) ------------------------------------


def register_name() -> None:
    if policy.BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(
            policy.BACKEND_NAME, "vllm_ringwindow.attention.cpu.RingCPUBackend"
        )
    copyreg.pickle(AttentionBackendEnum, _reduce_backend)  # type: ignore[arg-type]


def _reduce_backend(member: AttentionBackendEnum):
    if member.name == policy.BACKEND_NAME:
        return load_backend_name, (member.name,)
    return AttentionBackendEnum, (member.value,)


def load_backend_name(name: str) -> AttentionBackendEnum:
    """Unpickle a member by name: a spawned process reads its config before plugins.

    Raises:
        ValueError: the plugin is not active in this process.
    """
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if name not in AttentionBackendEnum.__members__:
        raise ValueError(
            f"attention backend {name!r} is not registered in this process: install "
            "vllm-ringwindow here too, and if VLLM_PLUGINS is set, let it name "
            "'ringwindow'"
        )
    return AttentionBackendEnum[name]


# -- routing (H2, H11) -------------------------------------------------------------


def route_layers() -> None:
    from vllm.platforms import current_platform

    _wrap(
        type(current_platform),
        "get_attn_backend_cls",
        ["cls", "selected_backend", "attn_selector_config"],
        _get_attn_backend_cls,
    )


def _get_attn_backend_cls(
    original, cls, selected_backend, attn_selector_config, *args, **kwargs
):
    from vllm.config import get_current_vllm_config_or_none
    from vllm.platforms import current_platform

    if getattr(selected_backend, "name", None) != policy.BACKEND_NAME:
        return original(cls, selected_backend, attn_selector_config, *args, **kwargs)
    inner = original(cls, _chosen_beside_rings(), attn_selector_config, *args, **kwargs)
    if inner not in policy.RING_BACKENDS and current_platform.is_rocm():
        inner = original(
            cls,
            AttentionBackendEnum.TRITON_ATTN,
            attn_selector_config,
            *args,
            **kwargs,
        )
    reason = policy.selector_reason(attn_selector_config)
    if reason is None and inner not in policy.RING_BACKENDS:
        reason = f"no ring for {inner.rsplit('.', 1)[-1]} yet"
    if reason is None:
        reason = policy.kernel_reason(inner, get_current_vllm_config_or_none())
    if reason is None:
        ring = policy.RING_BACKENDS[inner]
        if ring not in policy.PROVEN:
            logger.warning_once(
                "ring: rings on %s have not yet been run on a GPU; compare with stock "
                "before you rely on them: vllm-ringwindow verify MODEL",
                inner.rsplit(".", 1)[-1],
            )
        return ring
    if attn_selector_config.has_sliding_window:
        logger.info_once("ring: sliding-window layers pass through: %s", reason)
    return inner


def _chosen_beside_rings() -> AttentionBackendEnum | None:
    """The backend that the user chose for all other layers: rings are around it too."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    chosen = config and config.attention_config.backend
    return None if chosen is None or chosen.name == policy.BACKEND_NAME else chosen


def refuse_early() -> None:
    from vllm.platforms import current_platform

    _wrap(
        type(current_platform),
        "check_and_update_config",
        ["cls", "vllm_config"],
        _check_and_update_config,
    )


def _check_and_update_config(original, cls, vllm_config):
    original(cls, vllm_config)
    policy.check_supported(vllm_config)
    policy.include_drafter(vllm_config)


# -- specs and managers ------------------------------------------------------------


def register_spec() -> None:
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from vllm_ringwindow.core.manager import RingBlockManager
    from vllm_ringwindow.core.spec import RingWindowSpec

    # H3: with a custom spec first, the built-in ones would never be registered.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(RingWindowSpec, RingBlockManager)


def make_ring_specs() -> None:
    from vllm.model_executor.layers.attention import Attention

    _wrap(Attention, "get_kv_cache_spec", ["self", "vllm_config"], _get_kv_cache_spec)


def _get_kv_cache_spec(original, self, vllm_config):
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    from vllm_ringwindow.core.spec import RingParams, RingWindowSpec

    spec = original(self, vllm_config)
    if type(spec) is not SlidingWindowSpec or not policy.routed_to_ring(self):
        return spec
    if reason := policy.pass_through_reason(vllm_config):
        logger.info_once("ring: sliding-window layers pass through: %s", reason)
        return spec
    spec = RingWindowSpec.from_sliding_window(spec, RingParams.from_config(vllm_config))
    self.impl.reserve_staging(spec)
    return spec


def rest_requests() -> None:
    from vllm.v1.core import kv_cache_manager

    _wrap(
        kv_cache_manager,
        "get_kv_cache_coordinator",
        ["kv_cache_config"],
        _get_kv_cache_coordinator,
    )


def _get_kv_cache_coordinator(original, *args, **kwargs):
    from vllm_ringwindow.core.coordinator import let_requests_rest

    coordinator = original(*args, **kwargs)
    let_requests_rest(coordinator)
    return coordinator


# -- metrics and state -------------------------------------------------------------


def report_metrics() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.loggers import StatLoggerManager

    _wrap(Scheduler, "make_stats", ["self"], _make_stats)
    _wrap(StatLoggerManager, "__init__", ["self", "vllm_config"], _start_loggers)
    _wrap(
        StatLoggerManager,
        "record",
        ["self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"],
        _record_stats,
    )


def _make_stats(original, self, *args, **kwargs):
    from vllm_ringwindow.metrics import EngineCounts

    stats = original(self, *args, **kwargs)
    if stats is not None and stats.kv_connector_stats is None:
        counts = vars(self).get("_ringwindow_counts")
        if counts is None:
            counts = self._ringwindow_counts = EngineCounts(self)
        if found := counts():
            stats.kv_connector_stats = {STATS_KEY: found}
    return stats


def _start_loggers(original, self, vllm_config, *args, **kwargs):
    from vllm_ringwindow.config import ring_config

    original(self, vllm_config, *args, **kwargs)
    self._ringwindow_metrics = None
    if policy.ring_requested(vllm_config) and ring_config(vllm_config).metrics:
        from vllm_ringwindow.metrics import RingMetrics

        self._ringwindow_metrics = RingMetrics(
            vllm_config.model_config.served_model_name, self.engine_indexes
        )


def _record_stats(
    original,
    self,
    scheduler_stats,
    iteration_stats,
    mm_cache_stats=None,
    engine_idx=None,
):
    carried = scheduler_stats and scheduler_stats.kv_connector_stats
    if carried and STATS_KEY in carried:
        scheduler_stats.kv_connector_stats = None
        if self._ringwindow_metrics is not None:
            self._ringwindow_metrics.observe(carried[STATS_KEY], engine_idx or 0)
    return original(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)


def answer_state() -> None:
    """``EngineCore.ringwindow_state``, called by name from the API server."""
    if core := sys.modules.get("vllm.v1.engine.core"):
        vars(core)["EngineCore"].ringwindow_state = _ringwindow_state


def _ringwindow_state(self, request_id: str | None = None) -> dict | None:
    from vllm_ringwindow.state import engine_state, request_state

    if request_id is None:
        return engine_state(self.scheduler)
    return request_state(self.scheduler, request_id)


# -- what was decided --------------------------------------------------------------


def report_decision() -> None:
    from vllm.v1.core import kv_cache_utils

    _wrap(
        kv_cache_utils,
        "get_kv_cache_configs",
        ["vllm_config", "kv_cache_specs"],
        _report_configs,
    )
    # The engine core imports it by name; workers never import the engine core.
    if core := sys.modules.get("vllm.v1.engine.core"):
        vars(core)["get_kv_cache_configs"] = kv_cache_utils.get_kv_cache_configs


def _report_configs(original, vllm_config, kv_cache_specs, *args, **kwargs):
    from vllm_ringwindow.report import log_decision

    configs = original(vllm_config, kv_cache_specs, *args, **kwargs)
    if policy.ring_requested(vllm_config):
        log_decision(vllm_config, configs[0])
    return configs


PATCHES = (
    Patch(
        name="backend name",
        target="vllm.v1.attention.backends.registry.AttentionBackendEnum",
        why="a member added at run time is pickled by value and unknown to a spawned "
        "process that reads its config before it loads plugins",
        upstream="register_backend() takes string names since 0.32; pickling by value",
        remove_when="the enum pickles by name and loads plugins first",
        apply=register_name,
    ),
    Patch(
        name="routing",
        target="vllm.platforms.<platform>.get_attn_backend_cls",
        why="the CPU platform ignores the selected backend; other platforms apply it "
        "to every layer, global attention included",
        upstream="none",
        remove_when="platforms honour a plugin's backend per layer",
        apply=route_layers,
    ),
    Patch(
        name="early refusal",
        target="vllm.platforms.<platform>.check_and_update_config",
        why="a refused option should be named by the process that parsed it",
        upstream="no hook for plugins to validate a config",
        remove_when="plugins can validate VllmConfig",
        apply=refuse_early,
    ),
    Patch(
        name="spec registry",
        target="vllm.v1.kv_cache_spec_registry.KVCacheSpecRegistry",
        why="registering before the built-in specs would keep them out",
        upstream="register() is public, _ensure_registered() is not",
        remove_when="register() fills in the built-in specs itself",
        apply=register_spec,
    ),
    Patch(
        name="ring specs",
        target="vllm.model_executor.layers.attention.Attention.get_kv_cache_spec",
        why="AttentionBackend.customize_spec() sees neither the layer nor the config, "
        "both of which size a ring",
        upstream="customize_spec() is marked temporary (issue 42449)",
        remove_when="the backend builds the spec from the layer and the config",
        apply=make_ring_specs,
    ),
    Patch(
        name="resting requests",
        target="vllm.v1.core.kv_cache_manager.get_kv_cache_coordinator",
        why="the coordinator asks every group about every request in every step, and "
        "most answers are no",
        upstream="none",
        remove_when="the coordinator asks only when a block border is crossed",
        apply=rest_requests,
    ),
    Patch(
        name="metrics",
        target="vllm.v1.core.sched.scheduler.Scheduler.make_stats, "
        "vllm.v1.metrics.loggers.StatLoggerManager",
        why="figures of the engine core reach the frontend in SchedulerStats only, "
        "whose fields are fixed",
        upstream="vllm.stat_logger_plugins see SchedulerStats, but cannot add to it",
        remove_when="SchedulerStats has a field for plugins",
        apply=report_metrics,
    ),
    Patch(
        name="engine state",
        target="vllm.v1.engine.core.EngineCore.ringwindow_state",
        why="the API server calls the engine core's methods by name, and a plugin has "
        "none there",
        upstream="vllm.endpoint_plugins reach workers by collective_rpc(), the "
        "scheduler not at all",
        remove_when="plugins can register an engine core method",
        apply=answer_state,
    ),
    Patch(
        name="start-up report",
        target="vllm.v1.core.kv_cache_utils.get_kv_cache_configs",
        why="the one place that knows groups, blocks and configuration together",
        upstream="no hook",
        remove_when="plugins are told the final KVCacheConfig",
        apply=report_decision,
    ),
)


def apply_all() -> None:
    """Apply every patch; safe to call again (vLLM loads plugins in each process)."""
    for patch in PATCHES:
        patch.apply()
