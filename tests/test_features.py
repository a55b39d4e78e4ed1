# SPDX-License-Identifier: Apache-2.0
"""Features beside rings: each equals stock with the same feature on."""

import itertools
import json

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from tests.harness import (
    DEFAULTS,
    RING,
    STOCK,
    assert_same,
    differs,
    engine,
    random_prompts,
    run,
    run_spawned,
    sampling_params,
    to_output,
)

pytestmark = pytest.mark.engine

W = 64
LENGTHS = [10, W, 100, 300, 6 * W]
CHUNKED = dict(max_num_batched_tokens=100)


@pytest.fixture(scope="module")
def gemma(models):
    return models("gemma3", W)


def equal_to_stock(model, prompts, max_tokens=48, **options):
    """The ring in chunks of 100 tokens equals stock in one step."""
    expected = run(model, STOCK, prompts, max_tokens, **options)
    for caching in (True, False):
        ring = run(
            model,
            RING,
            prompts,
            max_tokens,
            enable_prefix_caching=caching,
            **options,
            **CHUNKED,
        )
        assert_same(expected, ring)


@pytest.mark.feature("fp8 KV cache (e4m3, e5m2)", "works")
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_kv_cache(gemma, dtype):
    """Case 23: copies move raw bytes."""
    equal_to_stock(gemma, random_prompts(LENGTHS), kv_cache_dtype=dtype)


@pytest.mark.feature("`kv_cache_dtype_skip_layers`", "works")
def test_fp8_with_sliding_layers_left_out(gemma):
    """Two precisions share blocks: fresh blocks are zeroed, recycled ones not (I11)."""
    equal_to_stock(
        gemma,
        random_prompts(LENGTHS),
        kv_cache_dtype="fp8",
        kv_cache_dtype_skip_layers=["sliding_window"],
    )


@pytest.mark.feature("KV sharing (Gemma 3n), fast prefill too", "works")
@pytest.mark.parametrize("fast_prefill", [False, True])
def test_layers_that_share_kv_read_what_their_target_wrote(models, fast_prefill):
    """Gemma 3n: the target's staging lives until the step ends (H8)."""
    prompts = random_prompts(LENGTHS)
    model = models("gemma3n", W)
    expected = run(model, STOCK, prompts, 48)
    with engine(model, RING, kv_sharing_fast_prefill=fast_prefill, **CHUNKED) as e:
        assert len(e.rings) > 0
        assert_same(expected, e.run(prompts, 48))


MANY_STAGED = dict(max_num_batched_tokens=400, long_prefill_token_threshold=50)


def test_several_staged_prefills_of_a_shared_layer_keep_their_staging(
    models, monkeypatch
):
    """More staged rows in a step than one chunk's staging holds; and the negative."""
    prompts = random_prompts([3 * W + i for i in range(8)])
    model = models("gemma3n", W)
    expected = run(model, STOCK, prompts, 24)
    assert_same(expected, run(model, RING, prompts, 24, **MANY_STAGED))
    monkeypatch.setattr(
        "vllm_ringwindow.attention.builder.sharing_targets", lambda config: set()
    )
    with pytest.raises(AssertionError):
        assert_same(expected, run(model, RING, prompts, 24, **MANY_STAGED))


@pytest.mark.feature("logit bias, penalties, minimum tokens", "works")
def test_logit_bias_and_penalties(gemma):
    prompts = random_prompts([40, 3 * W, 6 * W])
    sampling = dict(
        logit_bias={7: 5.0, 11: -100.0}, repetition_penalty=1.2, min_tokens=5
    )
    outputs = []
    for backend in (STOCK, RING):
        with engine(gemma, backend, **CHUNKED) as e:
            outputs.append(e.run(prompts, 40, **sampling))
    assert_same(*outputs)


@pytest.mark.feature("preemption, priority", "works")
def test_priority_scheduling(gemma):
    prompts = random_prompts([30, 40, 50, 60, 35, 45])
    expected = run(gemma, STOCK, prompts, 200)
    options = dict(
        scheduling_policy="priority", max_model_len=480, num_gpu_blocks_override=62
    )
    with engine(gemma, RING, **options) as e:
        assert_same(expected, e.run(prompts, 200))
        assert e.num_preemptions >= 2


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A rank-8 LoRA of the tiny Mistral's attention projections."""
    path = tmp_path_factory.mktemp("lora")
    rng = torch.Generator().manual_seed(1)
    sizes = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
    weights = {}
    for layer, (name, size) in itertools.product(range(4), sizes.items()):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        for part, shape in (("A", (8, 128)), ("B", (size, 8))):
            tensor = torch.randn(shape, generator=rng) * 0.05
            weights[f"{prefix}.lora_{part}.weight"] = tensor
    save_file(weights, path / "adapter_model.safetensors")
    config = dict(
        peft_type="LORA", r=8, lora_alpha=16, target_modules=list(sizes), bias="none"
    )
    (path / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest("adapter", 1, str(path))


@pytest.mark.feature("LoRA", "works")
def test_lora_beside_the_base_model(models, adapter):
    prompts = random_prompts([10, W, 300])
    outputs = []
    for backend, chunk in ((STOCK, 2048), (RING, 100)):
        options = dict(enable_lora=True, max_lora_rank=8, max_num_batched_tokens=chunk)
        with engine(models("mistral", W), backend, **options) as e:
            done = [
                output
                for lora in (None, adapter)
                for output in e.llm.generate(
                    [{"prompt_token_ids": p} for p in prompts],
                    sampling_params(40),
                    lora_request=lora,
                )
            ]
            outputs.append([to_output(o) for o in done])
    assert_same(*outputs)
    assert differs(outputs[0][:3], outputs[0][3:])  # the adapter does something


@pytest.mark.feature("compiled models", "works")
@pytest.mark.slow
def test_a_compiled_model(gemma, monkeypatch):
    """vLLM's default, without ``enforce_eager``: the attention op stays opaque."""
    monkeypatch.delenv("VLLM_CPU_CI_ENV")
    prompts = random_prompts([10, 3 * W, 6 * W])
    expected = run(gemma, STOCK, prompts, 24)
    options = DEFAULTS | CHUNKED | dict(enforce_eager=False)
    assert_same(expected, run_spawned(gemma, RING, prompts, 24, **options))
