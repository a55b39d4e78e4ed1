# SPDX-License-Identifier: Apache-2.0
"""The runtime patches: still needed, applied once, loud. ``test_plugin``: what they do.

A test that says "vLLM still ..." fails once vLLM no longer needs the patch: remove it
then, as its entry in ``patches/README.md`` says.
"""

import copyreg
import inspect
from dataclasses import dataclass, fields
from importlib import import_module

import pytest
import torch
import vllm.v1.engine.core  # noqa: F401  two patches are of it, once it is loaded
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.metrics.stats import SchedulerStats

from tests.simulator import make_config
from tests.test_coordinator import decode
from vllm_ringwindow import compat, vllm_version
from vllm_ringwindow.cli import doctor
from vllm_ringwindow.compat import MARK, PATCHES, MissingTarget, State
from vllm_ringwindow.core.manager import RingBlockManager
from vllm_ringwindow.core.spec import RingWindowSpec

BY_NAME = {patch.name: patch for patch in PATCHES}

# Patch -> the functions that it wraps.
WRAPPED = {
    "routing": [(type(current_platform), "get_attn_backend_cls")],
    "early refusal": [(type(current_platform), "check_and_update_config")],
    "ring specs": [
        ("vllm.model_executor.layers.attention:Attention", "get_kv_cache_spec")
    ],
    "resting requests": [("vllm.v1.core.kv_cache_manager", "get_kv_cache_coordinator")],
    "metrics": [
        ("vllm.v1.core.sched.scheduler:Scheduler", "make_stats"),
        ("vllm.v1.metrics.loggers:StatLoggerManager", "__init__"),
        ("vllm.v1.metrics.loggers:StatLoggerManager", "record"),
    ],
    "start-up report": [(compat.planner(), "get_kv_cache_configs")],
}
# What else a patch needs to find.
NEEDED = {
    "spec registry": [(KVCacheSpecRegistry, "_ensure_registered")],
    "engine state": [("vllm.v1.engine.core", "EngineCore")],
    "start-up report": [("vllm.v1.engine.core", "get_kv_cache_configs")],
}


def owner_of(where):
    if not isinstance(where, str):
        return where
    module, _, name = where.partition(":")
    return getattr(import_module(module), name) if name else import_module(module)


def targets(table):
    return [
        pytest.param(patch, owner, name, id=f"{patch}: {name}")
        for patch, found in table.items()
        for owner, name in found
    ]


def function_of(owner, name):
    static = inspect.getattr_static(owner_of(owner), name)
    return static.__func__ if isinstance(static, classmethod) else static


def original_of(patch, index=0):
    return getattr(function_of(*WRAPPED[patch][index]), MARK)


@pytest.fixture(scope="module")
def model(models):
    return models("gemma3", 64)


# -- applied once, the original kept ---------------------------------------------------


@pytest.mark.parametrize("patch, owner, name", targets(WRAPPED))
def test_a_target_is_wrapped_once(patch, owner, name):
    before = function_of(owner, name)
    assert not hasattr(getattr(before, MARK), MARK)
    assert BY_NAME[patch].apply() is State.APPLIED
    assert function_of(owner, name) is before


def test_pickling_is_patched_once_and_other_reducers_are_kept(monkeypatch):
    before = copyreg.dispatch_table[AttentionBackendEnum]
    compat.pickle_by_name()
    assert copyreg.dispatch_table[AttentionBackendEnum] is before

    def another_plugins(member):
        return getattr, (AttentionBackendEnum, member.name)

    monkeypatch.setitem(copyreg.dispatch_table, AttentionBackendEnum, another_plugins)
    compat.pickle_by_name()
    reduce = copyreg.dispatch_table[AttentionBackendEnum]
    assert reduce(AttentionBackendEnum.CPU_ATTN)[0] is getattr
    assert reduce(AttentionBackendEnum["RING"])[0] is compat.load_backend_name


# -- loud ------------------------------------------------------------------------------


@pytest.mark.parametrize("patch, owner, name", targets(WRAPPED) + targets(NEEDED))
def test_a_missing_target_is_told_with_vllms_version(monkeypatch, patch, owner, name):
    owner = owner_of(owner)
    if name in vars(owner):
        monkeypatch.delattr(owner, name)
    if hasattr(owner, name):  # inherited: what a rename would leave
        monkeypatch.setattr(owner, name, lambda: None)
    with pytest.raises(MissingTarget) as error:
        BY_NAME[patch].apply()
    assert f"patch {patch!r} does not fit vLLM {vllm_version()}" in str(error.value)
    assert name in str(error.value)


def test_an_abstract_base_is_no_target(monkeypatch):
    monkeypatch.delattr("vllm.v1.core.sched.scheduler.Scheduler.make_stats")
    with pytest.raises(MissingTarget, match="no Scheduler.make_stats any more"):
        BY_NAME["metrics"].apply()


def test_doctor_lists_every_patch_with_its_state(monkeypatch):
    monkeypatch.delattr("vllm.v1.core.sched.scheduler.Scheduler.make_stats")
    monkeypatch.setattr(
        AttentionBackend, "select_for_layer", lambda *args: None, raising=False
    )
    findings = {f.about.removeprefix("patch: "): f for f in doctor._patches()}
    assert list(findings) == list(BY_NAME)
    assert findings["ring specs"].found.startswith("applied: vllm.model_executor")
    assert findings["routing"].found.startswith("not needed: already in this vLLM: ")
    assert findings["metrics"].status == "FAIL"
    assert "missing target: " in findings["metrics"].found
    assert [f.status for f in findings.values()].count("ok") == len(PATCHES) - 1


# -- still needed ----------------------------------------------------------------------


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_vllm_still_lacks_what_the_patch_is_for(patch):
    assert not patch.needless()


def test_vllm_still_pickles_backends_by_value():
    member = AttentionBackendEnum["RING"]
    assert member.__reduce_ex__(4) == (AttentionBackendEnum, (member.value,))


@pytest.mark.skipif(not current_platform.is_cpu(), reason="other platforms obey")
def test_the_cpu_platform_still_ignores_the_selected_backend():
    layer = AttentionSelectorConfig(
        head_size=32,
        dtype=torch.float32,
        kv_cache_dtype="auto",
        block_size=None,
        has_sliding_window=True,
    )
    ring = AttentionBackendEnum["RING"]
    path = original_of("routing")(type(current_platform), ring, layer)
    assert path == AttentionBackendEnum.CPU_ATTN.value


def test_vllm_still_asks_no_plugin_about_a_config(model, monkeypatch):
    wrong = {"additional_config": {"ringwindow": {"metricz": 1}}}
    with pytest.raises(ValueError, match="unknown key 'metricz'"):
        make_config(model, **wrong)
    original = classmethod(original_of("early refusal"))
    monkeypatch.setattr(type(current_platform), "check_and_update_config", original)
    make_config(model, **wrong)


def test_a_plugins_spec_still_keeps_the_built_in_ones_out(monkeypatch):
    monkeypatch.setattr("vllm.v1.kv_cache_spec_registry._REGISTRY_KVCACHESPEC_LIST", {})
    KVCacheSpecRegistry.register(RingWindowSpec, RingBlockManager)
    full = FullAttentionSpec(
        block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32
    )
    assert KVCacheSpecRegistry.get_manager_class(full) is None


def test_backends_still_see_neither_layer_nor_config():
    assert list(inspect.signature(AttentionBackend.customize_spec).parameters) == [
        "spec"
    ]


def test_vllm_still_asks_every_group_in_every_step(model, monkeypatch):
    monkeypatch.setattr(
        "vllm.v1.core.kv_cache_manager.get_kv_cache_coordinator",
        original_of("resting requests"),
    )
    calls = decode(model, tokens=64)
    assert min(calls.count(name) for name in set(calls)) >= 64


def test_the_schedulers_stats_still_have_no_place_for_plugins():
    assert not [f.name for f in fields(SchedulerStats) if "plugin" in f.name]


# Two changes of ``patches/`` have no runtime twin: the plugin does without.


@dataclass(frozen=True, kw_only=True)
class OneMoreField(SlidingWindowSpec):
    more: int = 0


def test_vllm_still_cannot_promote_a_spec_with_fields_of_its_own():
    common = dict(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    specs = {
        "full": FullAttentionSpec(**common),
        "sliding": OneMoreField(**common, sliding_window=64),
    }
    with pytest.raises(TypeError, match="unexpected keyword argument 'more'"):
        compat.planner()._promote_local_kv_cache_specs(specs)


def test_vllm_still_does_not_ask_managers_whether_a_hit_is_pending():
    assert not hasattr(SingleTypeKVCacheManager, "hit_is_pending")
