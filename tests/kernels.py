# SPDX-License-Identifier: Apache-2.0
"""One attention layer of a GPU backend on CPU tensors, stock and ring side by side.

vLLM's own metadata builders and impls run; what a CPU cannot execute, the kernel and
the cache write, is a torch function that honours the kernel's documented contract.
``triton_interpreted`` drives vLLM's real Triton kernels instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from vllm_ringwindow.core.spec import RingParams, RingWindowSpec
from vllm_ringwindow.geometry import cdiv

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 32


@dataclass(frozen=True)
class Step:
    """New tokens of each request in one step, decodes first as vLLM orders them."""

    tokens: dict[int, int]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: Sequence[int] | None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """The contract that paged attention kernels share, in float64.

    Args:
        q: ``[tokens, heads, size]``.
        k, v: ``[blocks, block_size, kv_heads, size]``.
        out: as ``q``; written.
        cu_seqlens_q: ``[rows + 1]`` first token of each row.
        seqused_k: ``[rows]`` keys of each row; its queries are the last of them.
        block_table: ``[rows, columns]``.
        window_size: keys to the left and right of a query; -1 is all.
    """
    block_size = k.shape[1]
    for row in range(len(seqused_k)):
        first, last = int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1])
        length = int(seqused_k[row])
        if first == last or length == 0:
            continue
        columns = cdiv(length, block_size)
        assert columns <= block_table.shape[1], "reads past the block table"
        blocks = block_table[row, :columns].long()
        keys = k[blocks].flatten(0, 1)[:length].double()
        values = v[blocks].flatten(0, 1)[:length].double()
        groups = q.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[first:last].double(), keys)
        scores *= softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(length - (last - first), length)[:, None]
        key_at = torch.arange(length)[None]
        if alibi_slopes is not None:
            scores += alibi_slopes.double()[:, None, None] * (key_at - at)
        hidden = key_at > at if causal else torch.zeros_like(key_at > at)
        if window_size is not None and window_size[0] >= 0:
            hidden = hidden | (key_at < at - window_size[0])
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            extra = sinks.double()[:, None, None].expand(-1, last - first, 1)
            weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    return out


def flash_attn_varlen_func(
    q, k, v, *, out, cu_seqlens_q, seqused_k, block_table, softmax_scale, causal,
    window_size, max_seqlen_q, max_seqlen_k, softcap=0.0, s_aux=None, **kwargs,
):  # fmt: skip
    """Stands in for FlashAttention's entry."""
    assert int(seqused_k.max()) <= max_seqlen_k, "max_seqlen_k is too small"
    query_lens = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    assert int(query_lens.max()) <= max_seqlen_q, "max_seqlen_q is too small"
    return attend(
        q,
        k,
        v,
        out=out,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        block_table=block_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        sinks=s_aux,
        alibi_slopes=kwargs.get("alibi_slopes"),
    )


def unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale,
    causal, window_size, block_table, softcap, sinks=None, **kwargs,
):  # fmt: skip
    """Stands in for vLLM's Triton launch."""
    return flash_attn_varlen_func(
        q,
        k,
        v,
        out=out,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        seqused_k=seqused_k,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        block_table=block_table,
        softcap=softcap,
        s_aux=sinks,
        alibi_slopes=kwargs.get("alibi_slopes"),
    )


def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, *args) -> None:
    """Write new K/V to their slots; -1 is padding."""
    size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // size, slot % size] = key[token]
            value_cache[slot // size, slot % size] = value[token]


class Module(AttentionLayerBase):
    """What builders and impls ask of the model's layer."""

    kv_sharing_target_layer_name = None
    _q_scale = _k_scale = _v_scale = torch.ones(())
    _q_scale_float = _k_scale_float = _v_scale_float = 1.0

    def __init__(self, layer_name: str, backend: type, impl) -> None:
        self.layer_name, self.backend, self.impl = layer_name, backend, impl

    def get_attn_backend(self) -> type:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        return None


@dataclass
class Layer:
    """One attention layer of one backend, with its cache and block tables."""

    config: VllmConfig
    backend: type
    spec: SlidingWindowSpec
    num_requests: int
    layout: str = "NHD"
    sinks: torch.Tensor | None = None
    softcap: float | None = None
    retained: Callable[[int], bool] = lambda block: False
    kernel_block: int | None = None  # tokens, where the kernel wants smaller blocks
    rows: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ring = isinstance(self.spec, RingWindowSpec)
        self.size = self.spec.block_size
        kernel = self.kernel_block or self.size
        self.split = self.size // kernel
        longest = self.config.model_config.max_model_len
        self.columns = cdiv(longest, self.size) + 4
        num_blocks = 1 + self.num_requests * self.columns
        shape = (num_blocks * self.split, kernel, KV_HEADS, 2 * HEAD_SIZE)
        if self.layout == "NHD":
            self.cache = torch.zeros(shape).transpose(1, 2)
        else:
            self.cache = torch.zeros(shape).transpose(1, 2).contiguous()
        self.free = list(range(num_blocks - 1, 0, -1))
        modules = self.config.compilation_config.static_forward_context
        name = f"layers.{len(modules)}"
        with set_current_vllm_config(self.config):
            self.impl = self.backend.get_impl_cls()(
                HEADS,
                HEAD_SIZE,
                HEAD_SIZE**-0.5,
                KV_HEADS,
                None,
                self.spec.sliding_window,
                "auto",
                logits_soft_cap=self.softcap,
                sinks=self.sinks,
            )
            modules[name] = self.layer = Module(name, self.backend, self.impl)
            self.builder = self.backend.get_builder_cls()(
                self.spec.copy_with_new_block_size(kernel),
                [name],
                self.config,
                torch.device("cpu"),
            )

    def allocate(self, request: int, length: int) -> None:
        """Append to the request's row, as the scheduler would.

        A ring recycles the block ``R`` places before; what of a chunk is not in the
        ring is null, unless prefix caching retains it.
        """
        row = self.rows.setdefault(request, [])
        end = cdiv(length, self.size)
        for block in range(len(row), end):
            if not self.ring:
                row.append(self.free.pop())
                continue
            R = self.spec.num_ring_blocks
            if block < end - R:
                row.append(self.free.pop() if self.retained(block) else 0)
                continue
            before = row[block - R] if block >= R else 0
            if before and not self.retained(block - R):
                row.append(before)
            else:
                row.append(self.free.pop())

    def metadata_of(self, step: Step, pad_to: int = 0) -> CommonAttentionMetadata:
        """What the model runner would hand to the builder; ``pad_to`` rows."""
        tokens = list(step.tokens.values())
        rows = max(len(tokens), pad_to)
        starts = np.zeros(rows + 1, np.int32)
        starts[1 : len(tokens) + 1] = np.cumsum(tokens)
        starts[len(tokens) + 1 :] = starts[len(tokens)]
        lengths = np.zeros(rows, np.int32)
        table = torch.zeros(rows, self.columns * self.split, dtype=torch.int32)
        slots: list[int] = []
        for i, (request, new) in enumerate(step.tokens.items()):
            before = self.lengths.get(request, 0)
            lengths[i] = before + new
            self.lengths[request] = before + new
            self.allocate(request, before + new)
            row = self.rows[request]
            kernel_blocks = torch.tensor(row)[:, None] * self.split
            kernel_blocks = (kernel_blocks + torch.arange(self.split)).flatten()
            table[i, : len(kernel_blocks)] = kernel_blocks
            slots += [
                row[p // self.size] * self.size + p % self.size
                for p in range(before, before + new)
            ]
        num_tokens = max(int(starts[-1]), pad_to)
        slots += [-1] * (num_tokens - len(slots))
        query_start = torch.from_numpy(starts)
        return CommonAttentionMetadata(
            query_start_loc=query_start.clone(),
            query_start_loc_cpu=query_start,
            seq_lens=torch.from_numpy(lengths).clone(),
            seq_lens_cpu_upper_bound=torch.from_numpy(lengths),
            num_reqs=rows,
            num_actual_tokens=num_tokens,
            max_query_len=max(tokens),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots),
        )

    def run(self, step: Step, q, k, v, pad_to: int = 0) -> torch.Tensor:
        """One forward; ``[T, heads, size]`` of the new tokens."""
        common = self.metadata_of(step, pad_to)
        metadata = self.builder.build(0, common)
        output = torch.full_like(q, float("nan"))
        with torch.no_grad():
            if not self.ring:
                self.impl.do_kv_cache_update(
                    self.layer, k, v, self.cache, common.slot_mapping[: len(k)]
                )
            self.impl.forward(self.layer, q, k, v, self.cache, metadata, output=output)
        return output[: sum(step.tokens.values())]


def specs(window: int, block_size: int) -> dict[str, SlidingWindowSpec]:
    """Stock's spec of the layer, and the ring's."""
    stock = SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        dtype=torch.float32,
        sliding_window=window,
    )
    params = RingParams(roll_back=0, prefix_caching=False)
    return {
        "stock": stock,
        "ring": RingWindowSpec.from_sliding_window(stock, params),
    }


def worst_difference(
    stock: Layer,
    ring: Layer,
    steps: Sequence[Step],
    pad_decodes_to: int = 0,
    seed: int = 0,
) -> float:
    """Largest difference of an output element over all steps, same inputs to both."""
    generator = torch.Generator().manual_seed(seed)
    worst = 0.0
    for step in steps:
        total = sum(step.tokens.values())
        decode = max(step.tokens.values()) == 1
        pad = pad_decodes_to if decode else 0
        q = torch.randn(max(total, pad), HEADS, HEAD_SIZE, generator=generator)
        k, v = torch.randn(2, max(total, pad), KV_HEADS, HEAD_SIZE, generator=generator)
        a = stock.run(step, q, k, v, pad)
        b = ring.run(step, q, k, v, pad)
        assert torch.isfinite(a).all() and torch.isfinite(b).all()
        worst = max(worst, float((a - b).abs().max()))
    return worst


# Prefill <, =, > the ring, chunks, mixed steps, decode across the wrap.
W, BLOCK = 40, 16
STEPS = [
    Step({0: 10}),
    Step({0: 1, 1: 150}),
    Step({0: 1, 1: 1, 2: 64, 3: 33}),
    Step({0: 1, 1: 1, 2: 1, 3: 90}),
    *[Step({0: 1, 1: 1, 2: 1, 3: 1})] * 60,
    Step({0: 1, 2: 1, 1: 70, 3: 20}),
    *[Step({0: 1, 1: 1, 2: 1, 3: 1})] * 20,
]
