# SPDX-License-Identifier: Apache-2.0
"""Shapes of real models, and vLLM's own planner on them without weights.

The numbers are those of each model's published ``config.json``, written into the
transformers config class that reads it; nothing is downloaded. Gemma 3 4B and 27B are
the text models, without the vision tower.
"""

import os

# Read by vLLM when it first logs. stdout is for ``--json -``.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import contextlib
import sys
import tempfile
from typing import Any, NamedTuple

import torch
from transformers import (
    Cohere2Config,
    Gemma3TextConfig,
    GptOssConfig,
    MinistralConfig,
    MistralConfig,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
)
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
)

from vllm_ringwindow.core.spec import RingParams, RingWindowSpec
from vllm_ringwindow.planning import kv_cache_config

DTYPE = torch.bfloat16
GIB = 1 << 30


class Shape(NamedTuple):
    """What the KV cache of a model depends on."""

    name: str
    config: PretrainedConfig

    @property
    def max_model_len(self) -> int:
        """The model's own, in tokens."""
        return self.config.max_position_embeddings

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def num_kv_heads(self) -> int:
        return self.config.num_key_value_heads

    @property
    def head_size(self) -> int:
        """Of keys and of values, in elements."""
        c = self.config
        return getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads

    @property
    def window(self) -> int:
        """``W`` in tokens, counting the current one, as vLLM builds the layers."""
        # A Cohere 2 layer sees sliding_window tokens before the current one.
        return self.config.sliding_window + (self.config.model_type == "cohere2")

    @property
    def windows(self) -> list[int | None]:
        """One entry per layer; None is full attention."""
        kinds = getattr(self.config, "layer_types", None)
        kinds = kinds or ["sliding_attention"] * self.num_layers
        return [self.window if k == "sliding_attention" else None for k in kinds]


def _gemma3(layers: int, hidden: int, heads: int, kv_heads: int, **fields: Any):
    return Gemma3TextConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        architectures=["Gemma3ForCausalLM"],
        **{"head_dim": 256, "sliding_window": 1024} | fields,
    )


def _gpt_oss(layers: int):
    return GptOssConfig(
        num_hidden_layers=layers,
        hidden_size=2880,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        sliding_window=128,
        max_position_embeddings=131072,
        architectures=["GptOssForCausalLM"],
    )


# All of Mistral 7B's and Phi-3's layers slide; one in six of Gemma 3's is full, one in
# four of Command A's, Olmo 3's and Ministral's, every other one of gpt-oss's.
SHAPES = {
    "gemma3-1b": Shape(
        "Gemma 3 1B",
        _gemma3(26, 1152, 4, 1, sliding_window=512, max_position_embeddings=32768),
    ),
    "gemma3-4b": Shape("Gemma 3 4B", _gemma3(34, 2560, 8, 4)),
    "gemma3-27b": Shape("Gemma 3 27B", _gemma3(62, 5376, 32, 16, head_dim=128)),
    "gpt-oss-20b": Shape("gpt-oss 20B", _gpt_oss(24)),
    "gpt-oss-120b": Shape("gpt-oss 120B", _gpt_oss(36)),
    "mistral-7b": Shape(
        "Mistral 7B v0.1",
        MistralConfig(
            num_hidden_layers=32,
            hidden_size=4096,
            num_attention_heads=32,
            num_key_value_heads=8,
            sliding_window=4096,
            max_position_embeddings=32768,
            architectures=["MistralForCausalLM"],
        ),
    ),
    "ministral-8b": Shape(
        "Ministral 8B",
        MinistralConfig(
            num_hidden_layers=36,
            hidden_size=4096,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            sliding_window=32768,
            layer_types=(["full_attention"] + ["sliding_attention"] * 3) * 9,
            max_position_embeddings=131072,
            architectures=["MistralForCausalLM"],
        ),
    ),
    "phi3-mini-4k": Shape(
        "Phi-3 mini 4k",
        Phi3Config(
            num_hidden_layers=32,
            hidden_size=3072,
            num_attention_heads=32,
            num_key_value_heads=32,
            sliding_window=2047,
            max_position_embeddings=4096,
            architectures=["Phi3ForCausalLM"],
        ),
    ),
    "command-a": Shape(
        "Command A 111B",
        Cohere2Config(
            num_hidden_layers=64,
            hidden_size=12288,
            num_attention_heads=96,
            num_key_value_heads=8,
            head_dim=128,
            sliding_window=4096,
            max_position_embeddings=131072,
            architectures=["Cohere2ForCausalLM"],
        ),
    ),
    "olmo3-7b": Shape(
        "Olmo 3 7B",
        Olmo3Config(
            num_hidden_layers=32,
            hidden_size=4096,
            num_attention_heads=32,
            num_key_value_heads=32,
            sliding_window=4096,
            max_position_embeddings=65536,
            architectures=["Olmo3ForCausalLM"],
        ),
    ),
}


def engine_config(
    shape: Shape, *, asynchronous: bool = True, **options: Any
) -> VllmConfig:
    """vLLM's configuration for a shape: bfloat16, block size 16, 8192 batched tokens.

    Args:
        shape: of ``SHAPES``.
        asynchronous: asynchronous scheduling, that is, two batches in flight.
        **options: more of ``EngineArgs``, or others.
    """
    values: dict[str, Any] = dict(
        dtype="bfloat16",
        block_size=16,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=GIB,  # or vLLM looks for memory of its own
        skip_tokenizer_init=True,
    )
    # Parts of vLLM and its kernels print.
    with tempfile.TemporaryDirectory() as model, contextlib.redirect_stdout(sys.stderr):
        shape.config.save_pretrained(model)
        args = EngineArgs(model=model, **(values | options))
        config = args.create_engine_config()
    # The CPU platform switches it off; the planner and scheduler have no such limit.
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.kv_cache_layout = "LBHNC"  # as the CPU backend resolves it
    return config


def layer_specs(
    shape: Shape, config: VllmConfig, *, ring: bool
) -> dict[str, KVCacheSpec]:
    """What each layer asks of the planner."""
    common: dict[str, Any] = dict(
        block_size=config.cache_config.block_size,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        dtype=DTYPE,
    )
    specs: dict[str, KVCacheSpec] = {}
    for i, window in enumerate(shape.windows):
        if window is None:
            specs[f"layers.{i}"] = FullAttentionSpec(**common)
            continue
        spec = SlidingWindowSpec(sliding_window=window, **common)
        if ring:
            params = RingParams.from_config(config)
            spec = RingWindowSpec.from_sliding_window(spec, params)
        specs[f"layers.{i}"] = spec
    return specs


def plan(
    config: VllmConfig, specs: dict[str, KVCacheSpec], kv_bytes: int
) -> KVCacheConfig | None:
    """What vLLM's planner makes of ``kv_bytes``; None if it refuses to start."""
    return kv_cache_config(config, [specs], kv_bytes)
