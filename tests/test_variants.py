# SPDX-License-Identifier: Apache-2.0
"""Variants of attention: on rings as in stock, or passed through."""

import pytest
import torch
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    ModernBertConfig,
    ModernBertModel,
)
from vllm.config import ModelConfig, PoolerConfig
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

from tests.harness import (
    RING,
    STOCK,
    assert_equals_reference,
    assert_same,
    differs,
    engine,
    random_prompts,
    run,
    tiny_tokenizer,
)
from vllm_ringwindow.policy import selector_reason

W = 64
LENGTHS = [10, W, 100, 300, 5 * W]
CHUNKED = dict(max_num_batched_tokens=100)
on_engines = pytest.mark.engine


@pytest.fixture(scope="module")
def gemma(models):
    return models("gemma3", W)


@pytest.fixture(scope="module")
def plain(gemma):
    return run(gemma, STOCK, random_prompts(LENGTHS), 30)


def impls(e):
    """The attention impl of every layer."""
    layers = e.llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return [layer.impl for layer in layers.values()]


def save_random(model_class, config, path):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model_class(config).save_pretrained(path)


def all_stock(e):
    return not e.rings and all(type(i) is CPUAttentionBackendImpl for i in impls(e))


# -- on rings --------------------------------------------------------------------------


@pytest.mark.feature("ALiBi", "works")
@on_engines
def test_alibi(gemma, plain, monkeypatch):
    """No CPU model has slopes and a window: every layer is given slopes here."""
    prompts = random_prompts(LENGTHS)
    init = CPUAttentionBackendImpl.__init__

    def with_slopes(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.alibi_slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])

    monkeypatch.setattr(CPUAttentionBackendImpl, "__init__", with_slopes)
    expected = run(gemma, STOCK, prompts, 30)
    assert_same(expected, run(gemma, RING, prompts, 30, **CHUNKED))
    assert all(differs([a], [b]) for a, b in zip(plain, expected))


@pytest.mark.feature("MQA, GQA, MHA", "works")
@on_engines
@pytest.mark.parametrize("kv_heads", [1, 4], ids=["MQA", "MHA"])
def test_key_and_value_heads(models, kv_heads):
    """Four query heads; every other test has two heads of keys (GQA)."""
    model = models("gemma3", W, num_key_value_heads=kv_heads)
    prompts = random_prompts(LENGTHS)
    expected = run(model, STOCK, prompts, 30)
    with engine(model, RING, **CHUNKED) as e:
        assert {r.kv_cache_spec.num_kv_heads for r in e.rings} == {kv_heads}
        assert_same(expected, e.run(prompts, 30))


# Overrides of the tiny Gemma 4, and the rings' block size and padding that follow.
GEMMA4 = {
    "wider global heads": (dict(), 64, False),
    "padded pages": (dict(global_head_dim=80), 32, True),
    "shared KV, K as V": (
        dict(
            layers=12,
            num_kv_shared_layers=6,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
        ),
        32,
        False,
    ),
}


@pytest.mark.feature("head sizes per layer, KV sharing (Gemma 4)", "works")
@on_engines
@pytest.mark.parametrize("case", GEMMA4)
def test_head_sizes_per_layer(models, case):
    """Gemma 4: sliding and global heads differ, so blocks or pages are evened out."""
    overrides, block_size, padded = GEMMA4[case]
    model = models("gemma4", W, **overrides)
    prompts = random_prompts(LENGTHS)
    expected = run(model, STOCK, prompts, 30)
    assert_equals_reference(model, prompts[-1:], expected[-1:])
    with engine(model, RING, **CHUNKED) as e:
        assert len({impl.head_size for impl in impls(e)}) == 2
        specs = [r.kv_cache_spec for r in e.rings]
        assert {s.block_size for s in specs} == {block_size}
        assert {s.page_size_bytes > s.unpadded_page_size_bytes for s in specs} == {
            padded
        }
        assert_same(expected, e.run(prompts, 30))


# -- passed through --------------------------------------------------------------------


@pytest.mark.feature("encoder-only attention", "passes through")
@on_engines
def test_encoder_only_attention_passes_through(tmp_path):
    """ModernBERT: a later token changes an earlier vector."""
    config = ModernBertConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        local_attention=W,
        global_attn_every_n_layers=2,
        max_position_embeddings=2048,
        initializer_range=0.15,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    save_random(ModernBertModel, config, tmp_path)
    tiny_tokenizer(tmp_path)
    prompts = random_prompts(LENGTHS)
    prompts.append(prompts[0][:-1] + [prompts[0][-1] - 1])
    options = dict(
        runner="pooling",
        skip_tokenizer_init=False,
        pooler_config=PoolerConfig(task="token_embed"),
    )
    vectors = []
    for backend in (STOCK, RING):
        with engine(tmp_path, backend, **options) as e:
            assert all_stock(e)
            assert {i.attn_type for i in impls(e)} == {AttentionType.ENCODER_ONLY}
            assert {i.sliding_window for i in impls(e)} == {-1, W // 2 + 1}
            done = e.llm.encode(
                [{"prompt_token_ids": p} for p in prompts],
                pooling_task="token_embed",
                use_tqdm=False,
            )
            vectors.append([o.outputs.data for o in done])
    stock, ring = vectors
    torch.testing.assert_close(ring, stock, atol=1e-4, rtol=0)
    assert (ring[0][0] - ring[-1][0]).abs().max() > 1e-3


@pytest.mark.feature("chunked-local attention (Llama 4)", "passes through")
@on_engines
def test_chunked_local_attention_passes_through(tmp_path):
    """Llama 4: chunks of W tokens in every other layer."""
    config = Llama4TextConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        intermediate_size_mlp=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        attention_chunk_size=W,
        no_rope_layer_interval=2,
        moe_layers=[],
        interleave_moe_layer_step=0,
        num_local_experts=2,
        max_position_embeddings=2048,
        initializer_range=0.15,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    save_random(Llama4ForCausalLM, config, tmp_path)
    prompts = random_prompts(LENGTHS)
    expected = run(tmp_path, STOCK, prompts, 30, **CHUNKED)
    with engine(tmp_path, RING, **CHUNKED) as e:
        assert not e.rings
        groups = e.kv.kv_cache_config.kv_cache_groups
        chunked = [type(g.kv_cache_spec) is ChunkedLocalAttentionSpec for g in groups]
        assert any(chunked) and not all(chunked)
        assert_same(expected, e.run(prompts, 30))


@pytest.mark.feature("multi-modal prefix attention", "passes through")
@on_engines
def test_multi_modal_prefix_attention_passes_through(gemma, plain, monkeypatch):
    """A model that says it has image ranges, asked text only."""
    monkeypatch.setattr(ModelConfig, "is_mm_prefix_lm", property(lambda self: True))
    with engine(gemma, RING, **CHUNKED) as e:
        assert all_stock(e)
        assert_same(plain, e.run(random_prompts(LENGTHS), 30))


SLIDING = AttentionSelectorConfig(
    head_size=32,
    dtype=torch.float32,
    kv_cache_dtype=None,
    block_size=None,
    has_sliding_window=True,
)


@pytest.mark.feature("MLA, sparse, cross-attention, R-SWA", "passes through")
@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        (dict(), None),
        (dict(has_sink=True), None),
        (dict(has_sliding_window=False), "no sliding window"),
        (dict(attn_type=AttentionType.ENCODER_ONLY), "encoder_only attention"),
        (dict(attn_type=AttentionType.ENCODER), "encoder attention"),
        (dict(attn_type=AttentionType.ENCODER_DECODER), "encoder_decoder attention"),
        (dict(use_mla=True), "mla or sparse attention"),
        (dict(use_sparse=True), "mla or sparse attention"),
        (dict(use_rswa=True), "reference sliding window"),
        (dict(use_mm_prefix=True), "multi-modal prefix attention"),
    ],
)
def test_why_a_layer_is_on_no_ring(traits, reason):
    found = selector_reason(SLIDING._replace(**traits))
    assert found is None if reason is None else reason in found.lower()
