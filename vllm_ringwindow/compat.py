# SPDX-License-Identifier: Apache-2.0
"""All that touches vLLM internals which are not extension points.

One entry per patch, listed in ``PATCHES``: target, why, how, upstream state, when to
remove it. Each is idempotent, keeps the original, fails loudly if upstream renamed its
target, and is left out where this vLLM has what it is for: ``patches/`` in the source
tree holds the same changes for vLLM itself, as hooks that ``use`` then takes.
"""

import copyreg
import functools
import inspect
import sys
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from vllm_ringwindow import policy, vllm_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MARK = "_ringwindow_original"
STATS_KEY = "ringwindow"


class MissingTarget(RuntimeError):
    """Upstream renamed or changed what a patch is for."""


class State(Enum):
    """What became of a patch."""

    APPLIED = "applied"
    NOT_NEEDED = "not needed: already in this vLLM"


def _nothing() -> None:
    pass


class Patch(NamedTuple):
    """One entry of the catalogue."""

    name: str
    target: str
    why: str
    upstream: str
    remove_when: str
    needless: Callable[[], bool]
    """Whether this vLLM itself has what the patch is for."""
    patch: Callable[[], None]
    use: Callable[[], None] = _nothing
    """Takes the hook that makes the patch needless."""

    def apply(self) -> State:
        """Patch vLLM, or take its hook; again changes nothing.

        Raises:
            MissingTarget: upstream renamed or changed the target.
        """
        try:
            if self.needless():
                self.use()
                return State.NOT_NEEDED
            self.patch()
            return State.APPLIED
        except (ImportError, AttributeError, MissingTarget) as error:
            raise MissingTarget(
                f"ringwindow: patch {self.name!r} does not fit vLLM {vllm_version()}: "
                f"{error} (its target: {self.target})"
            ) from error


def _wrap(owner: object, name: str, parameters: list[str], wrapper: Callable) -> None:
    """Replace ``owner.name`` by ``wrapper(original, ...)`` once.

    Raises:
        MissingTarget: it is gone or takes other parameters than expected.
    """
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    static = inspect.getattr_static(owner, name, None)
    function = static.__func__ if isinstance(static, classmethod) else static
    if function is None or getattr(function, "__isabstractmethod__", False):
        raise MissingTarget(f"vLLM has no {where} any more")
    if hasattr(function, MARK):
        return
    found = list(inspect.signature(function).parameters)
    if found[: len(parameters)] != parameters:
        raise MissingTarget(
            f"{where} takes {found}, expected it to begin with {parameters}"
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


def _engine_core(name: str) -> ModuleType | None:
    """The engine core's module, in its own process; others never import it.

    Raises:
        MissingTarget: it has no ``name``.
    """
    core = sys.modules.get("vllm.v1.engine.core")
    if core is not None and not hasattr(core, name):
        raise MissingTarget(f"vLLM has no {core.__name__}.{name} any more")
    return core


# -- the backend's name, and its pickling (H1) ------------------------------------


def pickles_by_name() -> bool:
    load, _ = AttentionBackendEnum.CPU_ATTN.__reduce_ex__(2)[:2]
    return load not in (AttentionBackendEnum, getattr)


def pickle_by_name() -> None:
    before = copyreg.dispatch_table.get(AttentionBackendEnum)
    if hasattr(before, MARK):
        return
    reduce = functools.partial(_reduce_backend, before)
    setattr(reduce, MARK, before)
    copyreg.pickle(AttentionBackendEnum, reduce)  # type: ignore[arg-type]


def _reduce_backend(before: Callable | None, member: AttentionBackendEnum):
    if member.name == policy.BACKEND_NAME:
        return load_backend_name, (member.name,)
    return before(member) if before else (AttentionBackendEnum, (member.value,))


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


def selects_per_layer() -> bool:
    return hasattr(AttentionBackend, "select_for_layer")


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
    def platform_choice(backend):
        return original(cls, backend, attn_selector_config, *args, **kwargs)

    if getattr(selected_backend, "name", None) != policy.BACKEND_NAME:
        return platform_choice(selected_backend)
    return policy.route_layer(attn_selector_config, platform_choice)


def has_config_hooks() -> bool:
    from vllm.config import vllm as config

    return hasattr(config, "register_config_hook")


def use_config_hook() -> None:
    from vllm.config.vllm import register_config_hook

    register_config_hook(policy.check_and_complete)


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
    policy.check_and_complete(vllm_config)


# -- specs and managers ------------------------------------------------------------


def built_in_specs_are_kept() -> bool:
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    return hasattr(KVCacheSpecRegistry, "_built_in_specs_registered")


def register_built_in_specs() -> None:
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    KVCacheSpecRegistry._ensure_registered()


def backends_finish_specs() -> bool:
    return hasattr(AttentionBackend, "finish_layer_spec")


def make_ring_specs() -> None:
    from vllm.model_executor.layers.attention import Attention

    _wrap(Attention, "get_kv_cache_spec", ["self", "vllm_config"], _get_kv_cache_spec)


def _get_kv_cache_spec(original, self, vllm_config):
    spec = original(self, vllm_config)
    if not policy.routed_to_ring(self):
        return spec
    return self.get_attn_backend().finish_layer_spec(spec, self, vllm_config)


def managers_rest() -> bool:
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    return hasattr(SingleTypeKVCacheManager, "rest")


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


def stats_have_a_place_for_plugins() -> bool:
    from vllm.v1.metrics.stats import SchedulerStats

    return "plugin_stats" in SchedulerStats.__dataclass_fields__


def use_plugin_stats() -> None:
    from vllm.v1.metrics.plugins import StatsPlugin, register_stats_plugin

    register_stats_plugin(STATS_KEY, StatsPlugin(_collect, _make_record))


def _collect(scheduler) -> dict[str, int] | None:
    """The engine core's end of the metrics."""
    from vllm_ringwindow.metrics import EngineCounts

    counts = vars(scheduler).get("_ringwindow_counts")
    if counts is None:
        counts = scheduler._ringwindow_counts = EngineCounts(scheduler)
    return counts()


def _make_record(vllm_config, engine_indexes) -> Callable[[Any, int], None] | None:
    """The frontend's end; None if metrics are off."""
    from vllm_ringwindow.config import ring_config

    if not policy.ring_requested(vllm_config) or not ring_config(vllm_config).metrics:
        return None
    from vllm_ringwindow.metrics import RingMetrics

    name = vllm_config.model_config.served_model_name
    return RingMetrics(name, engine_indexes).observe


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
    stats = original(self, *args, **kwargs)
    if stats is not None and stats.kv_connector_stats is None:
        if found := _collect(self):
            stats.kv_connector_stats = {STATS_KEY: found}
    return stats


def _start_loggers(original, self, vllm_config, *args, **kwargs):
    original(self, vllm_config, *args, **kwargs)
    self._ringwindow_record = _make_record(vllm_config, self.engine_indexes)


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
        if self._ringwindow_record is not None:
            self._ringwindow_record(carried[STATS_KEY], engine_idx or 0)
    return original(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)


def engine_takes_utilities() -> bool:
    from importlib.util import find_spec

    return find_spec("vllm.v1.engine.utility") is not None


def use_utility() -> None:
    from vllm.v1.engine.utility import register_engine_utility

    register_engine_utility("ringwindow_state", _ringwindow_state)


def answer_state() -> None:
    """``EngineCore.ringwindow_state``, called by name from the API server."""
    if core := _engine_core("EngineCore"):
        core.EngineCore.ringwindow_state = _ringwindow_state


def _ringwindow_state(self, request_id: str | None = None) -> dict | None:
    from vllm_ringwindow.state import engine_state, request_state

    if request_id is None:
        return engine_state(self.scheduler)
    return request_state(self.scheduler, request_id)


# -- what was decided --------------------------------------------------------------


def planner() -> ModuleType:
    """vLLM's planner: a module of its own since 0.33."""
    try:
        return import_module("vllm.v1.core.kv_cache_planning")
    except ModuleNotFoundError:
        return import_module("vllm.v1.core.kv_cache_utils")


def plan_kv_cache(
    vllm_config: "VllmConfig", specs: list[dict[str, KVCacheSpec]], memory: list[int]
) -> list[KVCacheConfig]:
    """What the planner makes of each rank's specs and bytes."""
    found = planner()
    if find_groups := getattr(found, "get_global_kv_cache_groups", None):
        groups = find_groups(vllm_config, specs)  # a step of its own since 0.33
        return found.get_kv_cache_configs(vllm_config, specs, memory, groups)
    return found.get_kv_cache_configs(vllm_config, specs, memory)


def config_is_announced() -> bool:
    return hasattr(planner(), "register_kv_cache_config_listener")


def use_config_listener() -> None:
    planner().register_kv_cache_config_listener(_report)


def report_decision() -> None:
    found = planner()
    _wrap(
        found,
        "get_kv_cache_configs",
        ["vllm_config", "kv_cache_specs"],
        _report_configs,
    )
    # The engine core imported it by name.
    if core := _engine_core("get_kv_cache_configs"):
        vars(core)["get_kv_cache_configs"] = found.get_kv_cache_configs


def _report_configs(original, vllm_config, kv_cache_specs, *args, **kwargs):
    configs = original(vllm_config, kv_cache_specs, *args, **kwargs)
    _report(vllm_config, configs)
    return configs


def _report(vllm_config, configs) -> None:
    from vllm_ringwindow.report import log_decision

    if policy.ring_requested(vllm_config):
        log_decision(vllm_config, configs[0])


PATCHES = (
    Patch(
        name="backend name",
        target="vllm.v1.attention.backends.registry.AttentionBackendEnum",
        why="a member added at run time is pickled by value and unknown to a spawned "
        "process that reads its config before it loads plugins",
        upstream="register_backend() takes string names since 0.32; pickling by value",
        remove_when="the enum pickles by name and loads plugins first",
        needless=pickles_by_name,
        patch=pickle_by_name,
    ),
    Patch(
        name="routing",
        target="vllm.platforms.<platform>.get_attn_backend_cls",
        why="the CPU platform ignores the selected backend; other platforms apply it "
        "to every layer, global attention included",
        upstream="none",
        remove_when="platforms honour a plugin's backend per layer",
        needless=selects_per_layer,
        patch=route_layers,
    ),
    Patch(
        name="early refusal",
        target="vllm.platforms.<platform>.check_and_update_config",
        why="a refused option should be named by the process that parsed it",
        upstream="no hook for plugins to validate a config",
        remove_when="plugins can validate VllmConfig",
        needless=has_config_hooks,
        patch=refuse_early,
        use=use_config_hook,
    ),
    Patch(
        name="spec registry",
        target="vllm.v1.kv_cache_spec_registry.KVCacheSpecRegistry",
        why="registering before the built-in specs would keep them out",
        upstream="register() is public, _ensure_registered() is not",
        remove_when="register() fills in the built-in specs itself",
        needless=built_in_specs_are_kept,
        patch=register_built_in_specs,
    ),
    Patch(
        name="ring specs",
        target="vllm.model_executor.layers.attention.Attention.get_kv_cache_spec",
        why="AttentionBackend.customize_spec() sees neither the layer nor the config, "
        "both of which size a ring",
        upstream="customize_spec() is marked temporary (issue 42449)",
        remove_when="the backend builds the spec from the layer and the config",
        needless=backends_finish_specs,
        patch=make_ring_specs,
    ),
    Patch(
        name="resting requests",
        target="vllm.v1.core.kv_cache_manager.get_kv_cache_coordinator",
        why="the coordinator asks every group about every request in every step, and "
        "most answers are no",
        upstream="none",
        remove_when="the coordinator asks only when a block border is crossed",
        needless=managers_rest,
        patch=rest_requests,
    ),
    Patch(
        name="metrics",
        target="vllm.v1.core.sched.scheduler.Scheduler.make_stats, "
        "vllm.v1.metrics.loggers.StatLoggerManager",
        why="figures of the engine core reach the frontend in SchedulerStats only, "
        "whose fields are fixed",
        upstream="vllm.stat_logger_plugins see SchedulerStats, but cannot add to it",
        remove_when="SchedulerStats has a field for plugins",
        needless=stats_have_a_place_for_plugins,
        patch=report_metrics,
        use=use_plugin_stats,
    ),
    Patch(
        name="engine state",
        target="vllm.v1.engine.core.EngineCore.ringwindow_state",
        why="the API server calls the engine core's methods by name, and a plugin has "
        "none there",
        upstream="vllm.endpoint_plugins reach workers by collective_rpc(), the "
        "scheduler not at all",
        remove_when="plugins can register an engine core method",
        needless=engine_takes_utilities,
        patch=answer_state,
        use=use_utility,
    ),
    Patch(
        name="start-up report",
        target="vllm.v1.core.kv_cache_utils.get_kv_cache_configs; since 0.33 of "
        "vllm.v1.core.kv_cache_planning",
        why="the one place that knows groups, blocks and configuration together",
        upstream="no hook",
        remove_when="plugins are told the final KVCacheConfig",
        needless=config_is_announced,
        patch=report_decision,
        use=use_config_listener,
    ),
)


def register_extensions() -> None:
    """What vLLM lets plugins register: nothing is patched."""
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from vllm_ringwindow.core.manager import RingBlockManager
    from vllm_ringwindow.core.spec import RingWindowSpec

    if policy.BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(
            policy.BACKEND_NAME, "vllm_ringwindow.attention.cpu.RingCPUBackend"
        )
    KVCacheSpecRegistry.register(RingWindowSpec, RingBlockManager)


def apply_all() -> None:
    """Apply every patch; safe to call again (vLLM loads plugins in each process)."""
    for patch in PATCHES:
        patch.apply()
    register_extensions()
