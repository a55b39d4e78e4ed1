# SPDX-License-Identifier: Apache-2.0
"""The plugin in vLLM: names, processes, routing, refusals, and what it says."""

import copyreg
import json
import logging
import pickle
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from vllm import LLM
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import _cached_get_attn_backend
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    SlidingWindowSpec,
    replace_as,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

import vllm_ringwindow
from tests.harness import DEFAULTS, RING, STOCK, assert_same, engine, random_prompts
from tests.simulator import make_config
from vllm_ringwindow import compat
from vllm_ringwindow.attention.cpu import RingCPUBackend
from vllm_ringwindow.core.manager import RingBlockManager
from vllm_ringwindow.core.spec import RingParams, RingWindowSpec
from vllm_ringwindow.policy import check_supported, pass_through_reason

W = 64
RING_FOR_SLIDING = {
    "attention_config": {"backend_per_kind": {"sliding_window": "ring"}}
}


@pytest.fixture(scope="module")
def gemma(models):
    return models("gemma3", W)


STOCK_SPEC = SlidingWindowSpec(
    block_size=32,
    num_kv_heads=2,
    head_size=32,
    dtype=torch.float32,
    sliding_window=W,
)


def make_spec(params=None):
    params = params or RingParams(roll_back=0, prefix_caching=True)
    return RingWindowSpec.from_sliding_window(STOCK_SPEC, params)


# -- versions --------------------------------------------------------------------------


@pytest.mark.parametrize("found", ["0.31.4", "0.34.0", "1.0"])
def test_an_unsupported_vllm_is_named(monkeypatch, found):
    monkeypatch.setattr(vllm_ringwindow, "version", lambda name: found)
    with pytest.raises(
        ImportError, match=f"supports vLLM >=0.32,<0.34, found.*{found}"
    ):
        vllm_ringwindow.vllm_version()


def test_a_missing_vllm_is_named(monkeypatch):
    def missing(name):
        raise vllm_ringwindow.PackageNotFoundError(name)

    monkeypatch.setattr(vllm_ringwindow, "version", missing)
    with pytest.raises(ImportError, match=r"install vllm-ringwindow\[cpu\]"):
        vllm_ringwindow.vllm_version()


def test_with_an_unsupported_vllm_stock_keeps_working(monkeypatch):
    monkeypatch.setattr(vllm_ringwindow, "version", lambda name: "0.40.0")
    monkeypatch.setattr(compat, "apply_all", lambda: pytest.fail("patched"))
    vllm_ringwindow.register()


def test_geometry_and_reference_need_no_vllm():
    code = """
        import sys
        sys.modules["vllm"] = None  # any import of vllm fails
        import vllm_ringwindow.geometry, vllm_ringwindow.reference
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


# -- names and pickling (H1, H3) -------------------------------------------------------


def test_registering_twice_changes_nothing():
    before = [patch.name for patch in compat.PATCHES], list(AttentionBackendEnum)
    vllm_ringwindow.register()
    assert (
        [patch.name for patch in compat.PATCHES],
        list(AttentionBackendEnum),
    ) == before
    from vllm.model_executor.layers.attention import Attention

    original = getattr(Attention.get_kv_cache_spec, compat.MARK)
    assert not hasattr(original, compat.MARK)


def test_a_backend_pickles_by_name():
    member = AttentionBackendEnum["RING"]
    data = pickle.dumps(member)
    assert b"load_backend_name" in data
    assert pickle.loads(data) is member
    flash = AttentionBackendEnum.FLASH_ATTN
    assert pickle.loads(pickle.dumps(flash)) is flash


def test_pickling_by_value_is_what_fails_elsewhere():
    """Without the reducer the other process gets a value that is no member there."""
    reducer = copyreg.dispatch_table.pop(AttentionBackendEnum)
    try:
        data = pickle.dumps(AttentionBackendEnum["RING"])
    finally:
        copyreg.dispatch_table[AttentionBackendEnum] = reducer
    assert b"load_backend_name" not in data


def test_a_process_without_the_plugin_says_so(gemma):
    data = pickle.dumps(AttentionBackendEnum["RING"])
    code = f"import pickle; pickle.loads({data!r})"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", "VLLM_PLUGINS": "another"},
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "VLLM_PLUGINS" in result.stderr and "'ringwindow'" in result.stderr


def test_built_in_specs_stay_registered():
    spec = make_spec()
    assert KVCacheSpecRegistry.get_manager_class(spec) is RingBlockManager
    assert KVCacheSpecRegistry.get_manager_class(STOCK_SPEC) is SlidingWindowManager


def test_a_renamed_target_is_loud():
    with pytest.raises(RuntimeError, match="vLLM has no LLM.generate_nothing any more"):
        compat._wrap(LLM, "generate_nothing", [], lambda *args: None)


def test_changed_parameters_are_loud():
    with pytest.raises(RuntimeError, match="expected it to begin with"):
        compat._wrap(LLM, "generate", ["self", "nothing"], lambda *args: None)


# -- the spec --------------------------------------------------------------------------


def test_a_spec_survives_pickling_and_replace():
    from dataclasses import replace

    spec = make_spec(RingParams(roll_back=7, prefix_caching=False))
    for copy in (
        pickle.loads(pickle.dumps(spec)),
        replace(spec, extra_retained_tokens=0),
        type(spec).merge([spec, spec]),
    ):
        assert copy == spec and copy.ring == spec.ring
        assert copy.num_ring_blocks == spec.num_ring_blocks


def test_promotion_to_full_attention_takes_the_spec_as_it_is():
    """H4: the hybrid manager off rebuilds it field by field."""
    full = replace_as(make_spec(), FullAttentionSpec, drop=("extra_retained_tokens",))
    assert full.sliding_window == W


def test_ring_and_stock_layers_never_share_a_group():
    assert make_spec().is_uniform_with_collection({"a": make_spec()})
    assert not make_spec().is_uniform_with_collection(
        {"a": make_spec(), "b": STOCK_SPEC}
    )


def test_kernel_blocks_smaller_than_blocks_keep_what_the_class_carries():
    """The worker's copy of the spec; ``test_gpu_backends`` runs on it."""
    spec = make_spec()
    assert spec.copy_with_new_block_size(32) is spec
    small = spec.copy_with_new_block_size(16)
    assert (small.block_size, small.ring.split) == (16, 2)
    assert small.num_ring_blocks <= 2 * spec.num_ring_blocks
    assert pickle.loads(pickle.dumps(small)) == small


# -- routing (H2, H11) -----------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.parametrize(
    "options", [RING, {"attention_backend": "ring"}, RING_FOR_SLIDING]
)
def test_every_way_to_ask_gives_rings_to_sliding_layers_only(gemma, options):
    with engine(gemma, options) as e:
        context = e.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        for layer in context.values():
            is_ring = layer.get_attn_backend() is RingCPUBackend
            assert is_ring == (layer.sliding_window is not None)
        assert len(e.rings) == 5


@pytest.mark.engine
def test_not_asking_gives_stock(gemma):
    with engine(gemma, STOCK) as e:
        assert not e.rings
        context = e.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        names = {layer.get_attn_backend().__name__ for layer in context.values()}
    assert names == {"CPUAttentionBackend"}


@pytest.mark.engine
def test_a_model_without_sliding_layers_runs_and_says_so(models):
    model = models("mistral", W, layers=2)
    config = json.loads((model / "config.json").read_text())
    full = model.parent / "full-attention"
    full.mkdir()
    (full / "config.json").write_text(json.dumps(config | {"sliding_window": None}))
    for weights in model.glob("*.safetensors"):
        (full / weights.name).symlink_to(weights)
    prompts = random_prompts([100, 200])
    with engine(full, STOCK) as e:
        expected = e.run(prompts)
    with Said() as said, engine(full, RING) as e:
        assert not e.rings
        assert_same(expected, e.run(prompts))
    assert "ring: NOT in use: no layer of this model is on a ring" in said.lines


# -- passed through, with the reason ---------------------------------------------------


def option(path, value):
    """An edit of a VllmConfig: what the CPU platform would not let a user ask for."""

    def edit(config):
        *owners, name = path.split(".")
        for owner in owners:
            config = getattr(config, owner)
        setattr(config, name, value)

    return edit


@pytest.mark.feature(
    "DCP, PCP, non-causal attention, other drafting methods", "passes through"
)
@pytest.mark.parametrize(
    "edit, reason",
    [
        (
            option("parallel_config.decode_context_parallel_size", 2),
            "--decode-context-parallel-size",
        ),
        (
            option("parallel_config.prefill_context_parallel_size", 2),
            "--prefill-context-parallel-size",
        ),
        (option("attention_config.use_non_causal", True), "non-causal"),
        (
            option("speculative_config", SimpleNamespace(method="medusa")),
            "speculative method 'medusa'",
        ),
    ],
)
def test_whole_engines_pass_through_with_the_reason(gemma, edit, reason):
    config = make_config(gemma, block_size=32)
    assert pass_through_reason(config) is None
    edit(config)
    assert reason in pass_through_reason(config)


@pytest.mark.engine
@pytest.mark.feature(
    "attention backends without a ring (FlexAttention, composites)", "passes through"
)
def test_a_backend_without_a_ring_passes_through(monkeypatch, gemma):
    """What a GPU platform chooses: no ring for it yet."""
    prompts = random_prompts([3 * W])
    with engine(gemma, STOCK) as e:
        expected = e.run(prompts)
    monkeypatch.setattr("vllm_ringwindow.policy.RING_BACKENDS", {})
    _cached_get_attn_backend.cache_clear()  # vLLM remembers its selections
    try:
        with Said() as said, engine(gemma, RING) as e:
            assert not e.rings
            assert_same(expected, e.run(prompts))
    finally:
        _cached_get_attn_backend.cache_clear()
    assert any("no ring for CPUAttentionBackend yet" in line for line in said.lines)


# -- refused, by option name -----------------------------------------------------------


@pytest.mark.feature("micro-batching (`--enable-dbo`, `--ubatch-size`)", "refused")
def test_micro_batching_is_refused_by_option():
    """The CPU platform switches it off before we are asked: the check itself."""
    ring = SimpleNamespace(name="RING")
    config = SimpleNamespace(
        attention_config=SimpleNamespace(backend=ring, backend_per_kind={}),
        parallel_config=SimpleNamespace(use_ubatching=True),
        additional_config={},
    )
    with pytest.raises(ValueError, match="--enable-dbo"):
        check_supported(config)


def test_a_misspelt_backend_is_vllms_own_error(gemma):
    with pytest.raises(ValueError, match="(?i)unknown attention backend.*rign.*RING"):
        LLM(str(gemma), **DEFAULTS, attention_backend="rign")


# -- what it says ----------------------------------------------------------------------


class Said(logging.Handler):
    """The plugin's own log messages while in a ``with`` block."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []
        self.logger = logging.getLogger("vllm.ringwindow")

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        self.before = self.logger.level
        self.logger.setLevel(logging.INFO)
        self.logger.addHandler(self)
        return self

    def __exit__(self, *_):
        self.logger.removeHandler(self)
        self.logger.setLevel(self.before)


@pytest.mark.engine
def test_the_start_up_lines_say_what_was_decided(gemma):
    options = dict(max_num_batched_tokens=512, enable_prefix_caching=False)
    with Said() as said, engine(gemma, RING, **options):
        pass
    page = 2 * 2 * 32 * 32 * 4  # K and V, 2 heads, 32 tokens of 32 floats
    stock_sliding = (W - 1 + 512 + 31) // 32 + 1
    staging = (W + 512 - 2 + 31) // 32 + 1
    assert said.lines == [
        "ring: on rings: 5 layers in 5 groups, window 64 tokens, block size 32, "
        "R = 3 blocks (96 tokens) per request and group",
        "ring: not on rings: 1 layer: full attention, paged growth as in stock vLLM",
        f"ring: KV per request of 2048 tokens: {(64 + 15) * page / 2**20:.1f} MiB "
        f"(79 blocks), stock {(64 + 5 * stock_sliding) * page / 2**20:.1f} MiB "
        f"({64 + 5 * stock_sliding} blocks); staging {staging * page / 2**20:.1f} MiB "
        "per worker",
    ]


@pytest.mark.engine
@pytest.mark.feature("hybrid KV cache manager off", "passes through")
def test_the_hybrid_manager_off_is_said(gemma):
    with Said() as said, engine(gemma, RING, disable_hybrid_kv_cache_manager=True):
        pass
    assert any("NOT in use" in line for line in said.lines)
    assert any("the hybrid KV cache manager is off" in line for line in said.lines)


@pytest.mark.engine
def test_staging_is_as_large_as_said_and_shared(gemma):
    with engine(gemma, RING, max_num_batched_tokens=512) as e:
        context = e.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        buffers = {
            id(layer.impl.staging): layer.impl.staging.buffer.numel()
            for layer in context.values()
            if layer.sliding_window is not None
        }
        e.run(random_prompts([500, 900]), 8)
        assert list(buffers.values()) == [
            ((W + 512 - 2 + 31) // 32 + 1) * 2 * 2 * 32 * 32 * 4
        ]
