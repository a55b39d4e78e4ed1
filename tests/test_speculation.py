# SPDX-License-Identifier: Apache-2.0
"""Drafts on rings: the same tokens as without, and the drafts that stock makes.

``test_simulated_scheduler`` runs what the CPU build cannot: asynchronous scheduling
and pipelines with drafts in flight.
"""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tests.harness import RING, STOCK, assert_same, engine, random_prompts, run
from vllm_ringwindow.core.spec import RingParams

pytestmark = pytest.mark.engine

W = 64
CHUNKED = dict(max_num_batched_tokens=100)
PROMPTS = random_prompts([10, W, 94, 95, 96, 97, 300, 6 * W])


@pytest.fixture(scope="module")
def gemma(models):
    return models("gemma3", W)


@pytest.fixture(scope="module")
def mistral(models):
    return models("mistral", W)


def drafts_of(e):
    """Every request's drafts as scheduled, in order."""
    drafts = {}
    for step in e.steps:
        for request_id, tokens in step.scheduled_spec_decode_tokens.items():
            drafts.setdefault(request_id, []).append(tuple(tokens))
    return [drafts[request_id] for request_id in sorted(drafts, key=natural)]


def natural(request_id):
    return len(request_id), request_id


def ngram(num_drafts):
    return dict(
        method="ngram",
        num_speculative_tokens=num_drafts,
        prompt_lookup_max=3,
        prompt_lookup_min=1,
    )


@pytest.mark.feature("ngram drafts", "works")
@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_case_15_ngram_drafts_rejected_around_the_wrap(gemma, num_drafts):
    """Prompts end at every offset around R * block_size; most drafts are rejected."""
    prompts = [
        list(itertools.islice(itertools.cycle(prompt[:7]), 96 + offset))
        for offset, prompt in enumerate(random_prompts([7] * 9), start=-4)
    ]
    plain = run(gemma, RING, prompts, 100)
    options = dict(speculative_config=ngram(num_drafts), **CHUNKED)
    with engine(gemma, RING, **options) as e:
        assert len(e.rings) == 5
        drafted = e.run(prompts, 100)
        assert any(s.scheduled_spec_decode_tokens for s in e.steps)
    assert_same(plain, drafted)


@pytest.fixture(scope="module")
def drafter(mistral, tmp_path_factory):
    """The target with noise: right often, and its rejections fall everywhere.

    Its own config has a window of 48. vLLM gives a Mistral-like drafter the target's.
    """
    path = tmp_path_factory.mktemp("drafter")
    config = json.loads((mistral / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"sliding_window": 48}))
    noise = torch.Generator().manual_seed(3)
    weights = {
        name: w + 0.05 * w.std() * torch.randn(w.shape, generator=noise)
        for name, w in load_file(mistral / "model.safetensors").items()
    }
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def draft_model(path, num_drafts):
    return dict(
        method="draft_model", model=str(path), num_speculative_tokens=num_drafts
    )


def assert_drafts_like_stock(model, speculation):
    """Same tokens as without drafts, and the same drafts as stock, step by step."""
    plain = run(model, STOCK, PROMPTS, 60)
    drafts = []
    for backend in (STOCK, RING):
        options = dict(speculative_config=speculation, **CHUNKED)
        with engine(model, backend, **options) as e:
            assert bool(e.rings) == (backend is RING)
            assert_same(plain, e.run(PROMPTS, 60))
            drafts.append(drafts_of(e))
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) == len(PROMPTS)


@pytest.mark.feature("draft model", "works")
@pytest.mark.parametrize("num_drafts", [1, 4])
def test_a_draft_model_shares_the_targets_rings(mistral, drafter, num_drafts):
    assert_drafts_like_stock(mistral, draft_model(drafter, num_drafts))


def test_drafts_without_slack_do_not_fit(mistral, drafter, monkeypatch):
    """The negative: a ring for the window alone."""
    monkeypatch.setattr(
        RingParams, "from_config", lambda config: RingParams(0, False, 0)
    )
    with pytest.raises(AssertionError):
        assert_drafts_like_stock(mistral, draft_model(drafter, 4))


@pytest.mark.feature("draft model beside a hybrid target", "passes through")
def test_a_draft_model_beside_a_hybrid_target_passes_through(gemma, drafter):
    """vLLM 0.32 hands it the first group's block table: wrong in stock as well."""
    options = dict(speculative_config=draft_model(drafter, 3))
    with engine(gemma, RING, **options) as e:
        assert not e.rings
        assert len(e.run(random_prompts([3 * W]), 8)[0].tokens) == 8


def eagle_head(path, eagle3):
    """A random head of one layer, fed by the target's last layer or by three."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=16384,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
    )
    layer = "midlayer." if eagle3 else "layers.0."
    into_layer = 256 if eagle3 else 128
    shapes = {
        "fc": (128, 128 * (3 if eagle3 else 2)),
        f"{layer}self_attn.q_proj": (128, into_layer),
        f"{layer}self_attn.k_proj": (64, into_layer),
        f"{layer}self_attn.v_proj": (64, into_layer),
        f"{layer}self_attn.o_proj": (128, 128),
        f"{layer}mlp.gate_proj": (256, 128),
        f"{layer}mlp.up_proj": (256, 128),
        f"{layer}mlp.down_proj": (128, 256),
    }
    rng = torch.Generator().manual_seed(5)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=rng) * 1.5 * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    norms = [f"{layer}post_attention_layernorm"]
    if eagle3:
        norms += ["norm", f"{layer}hidden_norm", f"{layer}input_layernorm"]
        weights["lm_head.weight"] = torch.randn(512, 128, generator=rng) * 0.3
    weights |= {f"{name}.weight": torch.ones(128) for name in norms}
    config.save_pretrained(path)
    save_file(weights, path / "model.safetensors")
    return path


@pytest.mark.feature("EAGLE and EAGLE-3 heads", "works")
@pytest.mark.parametrize(
    "method, target", [("eagle", "mistral"), ("eagle", "gemma3"), ("eagle3", "mistral")]
)
def test_eagle_heads_draft_what_they_draft_in_stock(models, tmp_path, method, target):
    """On the target's ring (Mistral) or with a group of full attention (Gemma 3)."""
    head = eagle_head(tmp_path, eagle3=method == "eagle3")
    speculation = dict(method=method, model=str(head), num_speculative_tokens=3)
    assert_drafts_like_stock(models(target, W), speculation)
