# SPDX-License-Identifier: Apache-2.0
"""A ``flashinfer`` package for machines without CUDA.

Its wrappers keep what ``plan`` was given, as FlashInfer 0.7 does, and compute ``run``
from that alone, in float64; a breach of the documented contract raises ``ValueError``.
vLLM's own builder and impl run around them. The XQA and TRTLLM-gen entries only raise:
nothing here stands in for them.
"""

import importlib
import sys
from types import ModuleType

import pytest
import torch

from tests import kernels

VLLM_MODULE = "vllm.v1.attention.backends.flashinfer"
RING_MODULE = "vllm_ringwindow.attention.flashinfer"


def require(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


def get_seq_lens(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:
    """``flashinfer.get_seq_lens``: ``[batch]`` tokens of each row."""
    pages = kv_indptr[1:] - kv_indptr[:-1]
    return torch.clamp(pages - 1, min=0) * page_size + kv_last_page_len


class PagedWrapper:
    """What both wrappers share: the pages of each row, and the attention.

    With ``use_cuda_graph``, ``run`` reads the buffers that the wrapper was made with,
    as a replayed graph would, whatever the last plan was.
    """

    def __init__(
        self,
        workspace: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        use_tensor_cores: bool = False,
        backend: str = "auto",
    ) -> None:
        require(kv_layout in ("NHD", "HND"), kv_layout)
        require(workspace.dtype == torch.uint8, "the workspace has bytes")
        self.workspace = workspace
        self.kv_layout = kv_layout
        self.is_cuda_graph_enabled = use_cuda_graph
        self.indptr = paged_kv_indptr_buffer
        self.indices = paged_kv_indices_buffer
        self.last_page_len = paged_kv_last_page_len_buffer

    def _plan(
        self,
        qo_indptr: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        seq_lens: torch.Tensor | None,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool,
        sm_scale: float | None,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        o_data_type: torch.dtype,
    ) -> None:
        for name, t in dict(
            qo_indptr=qo_indptr, indptr=indptr, last_page_len=last_page_len
        ).items():
            require(t.device.type == "cpu", f"{name} would be read back")
            require(t.dtype == torch.int32 and t.dim() == 1, f"{name}: {t.dtype}")
        rows = len(last_page_len)
        require(len(indptr) == rows + 1, "indptr has batch_size + 1 entries")
        require(len(qo_indptr) == rows + 1, "qo_indptr has batch_size + 1 entries")
        pages, new = indptr[1:] - indptr[:-1], qo_indptr[1:] - qo_indptr[:-1]
        require((pages >= 0).all() and indptr[0] >= 0, "indptr decreases")
        require(qo_indptr[0] == 0 and (new >= 0).all(), "qo_indptr decreases")
        require(indptr[-1] <= len(indices), "indptr runs beyond indices")
        empty = pages == 0
        within = (last_page_len >= 1) & (last_page_len <= page_size)
        require((within | empty).all(), "last_page_len is not in 1..page_size")
        require((last_page_len[empty] == 0).all(), "last_page_len of a row of no pages")
        lens = get_seq_lens(indptr, last_page_len, page_size)
        if seq_lens is not None:
            require(torch.equal(seq_lens, lens), "seq_lens contradict the pages")
        if causal:
            # A decode's padding rows have a query and no pages.
            require(((new <= lens) | empty).all(), "more queries than keys")
        require(num_qo_heads % num_kv_heads == 0, "heads")
        require(window_left >= -1, "window_left")
        self.shape = (page_size, num_kv_heads, head_dim)
        self.num_qo_heads = num_qo_heads
        self.dtypes = (q_data_type, kv_data_type, o_data_type)
        self.qo_indptr = qo_indptr.clone()
        self._causal = causal
        self._sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale
        self._window_left = window_left
        self._logits_soft_cap = logits_soft_cap or 0.0

    def _keep(self, indptr, indices, last_page_len) -> None:
        """Host arguments are copied to the device; indices are there and kept."""
        if not self.is_cuda_graph_enabled:
            self.indptr, self.last_page_len = indptr.clone(), last_page_len.clone()
            self.indices = indices
            return
        require(
            len(last_page_len) == len(self.last_page_len), "the batch size is fixed"
        )
        require(len(indices) <= len(self.indices), "more indices than the buffer holds")
        self.indptr.copy_(indptr)
        self.last_page_len.copy_(last_page_len)
        self.indices[: len(indices)].copy_(indices)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        q_scale: float = 1.0,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        out: torch.Tensor,
        kv_cache_sf: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[tokens, heads, size]`` of queries over the planned pages."""
        require(kv_cache_sf is None and sinks is None, "not stood in for")
        require((q_scale, k_scale, v_scale) == (1, 1, 1), "not stood in for")
        k, v = paged_kv_cache
        if self.kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        require(k.shape[1:] == self.shape == v.shape[1:], f"a page of {k.shape[1:]}")
        require((q.dtype, k.dtype, out.dtype) == self.dtypes, "dtypes of another plan")
        require(len(q) == self.qo_indptr[-1], "queries of another plan")
        require(q.shape[1:] == (self.num_qo_heads, self.shape[-1]), "heads")
        indptr = self.indptr.tolist()
        lens = get_seq_lens(self.indptr, self.last_page_len, self.shape[0])
        used = self.indices[indptr[0] : indptr[-1]]
        require(((used >= 0) & (used < len(k))).all(), "a page beyond the cache")
        width = max(1, *(b - a for a, b in zip(indptr, indptr[1:])))
        table = torch.zeros(len(lens), width, dtype=torch.int32)
        for row, (first, last) in enumerate(zip(indptr, indptr[1:])):
            table[row, : last - first] = self.indices[first:last]
        kernels.attend(
            q,
            k,
            v,
            out=out,
            cu_seqlens_q=self.qo_indptr,
            seqused_k=lens,
            block_table=table,
            softmax_scale=self._sm_scale,
            causal=self._causal,
            window_size=(self._window_left, 0),
            softcap=self._logits_soft_cap,
        )
        return out


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type,
        kv_data_type,
        o_data_type,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
    ):  # fmt: skip
        self._plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            seq_lens,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            page_size=page_size,
            causal=causal,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            o_data_type=o_data_type,
        )
        self._keep(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """One query token for each row."""

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        keep=True,
        seq_lens=None,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type,
        kv_data_type,
        o_data_type=None,
        pos_encoding_mode="NONE",
        data_type=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        fixed_split_size=None,
        disable_split_kv=False,
    ):  # fmt: skip
        require(
            pos_encoding_mode == "NONE" and block_tables is None, "not stood in for"
        )
        self._plan(
            torch.arange(len(last_page_len) + 1, dtype=torch.int32),
            indptr,
            indices,
            last_page_len,
            seq_lens,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            causal=True,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            o_data_type=o_data_type or q_data_type,
        )
        if keep:
            self._keep(indptr, indices, last_page_len)


def fast_decode_plan(wrapper, **arguments) -> None:
    """A graph's later plans: its buffers are the caller's to fill."""
    require(wrapper.is_cuda_graph_enabled, "for graphs")
    arguments["kv_data_type"] = arguments["kv_data_type"] or arguments["q_data_type"]
    wrapper.plan(keep=False, **arguments)


class NotHere:
    """Imported by vLLM, and not stood in for."""

    def __init__(self, *args, **kwargs) -> None:
        raise NotImplementedError("the stand-in has no such kernel")


class CopyPageIndices:
    """vLLM's ``_copy_page_indices_kernel``, launched as ``kernel[grid](...)``."""

    def __getitem__(self, grid: tuple[int]):
        def copy(page_indices, block_table, stride, cu_num_blocks, BLOCK_SIZE):
            if block_table.device.type == "meta":
                return
            require(block_table.stride(0) == stride, "another table's stride")
            for row in range(grid[0]):
                first, last = cu_num_blocks[row : row + 2].tolist()
                require(last - first <= block_table.shape[1], "reads past the table")
                page_indices[first:last] = block_table[row, : last - first]

        return copy


def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Put the package into ``sys.modules``, import vLLM's backend around it.

    Returns the ring's module. All is forgotten when ``monkeypatch`` is undone.
    """
    names = {
        "flashinfer": dict(
            BatchAttentionWithAttentionSinkWrapper=type("Sinks", (NotHere,), {}),
            BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
            BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
            BatchPrefillWithRaggedKVCacheWrapper=NotHere,
            get_seq_lens=get_seq_lens,
            nvfp4_quantize_append_paged_kv_cache_with_slot_mapping=NotHere,
        ),
        "flashinfer.decode": dict(
            fast_decode_plan=fast_decode_plan,
            trtllm_batch_decode_with_kv_cache=NotHere,
        ),
        "flashinfer.prefill": dict(trtllm_batch_context_with_kv_cache=NotHere),
        "flashinfer.utils": dict(FP4Tensor=NotHere),
    }
    for name, contents in names.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    # Else vLLM would ask NVIDIA's server for kernels.
    monkeypatch.setattr("vllm.utils.flashinfer.has_nvidia_artifactory", lambda: False)
    monkeypatch.setenv("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", str(1 << 20))
    monkeypatch.setattr(
        torch.ops._C_cache_ops,
        "reshape_and_cache_flash",
        kernels.reshape_and_cache,
        raising=False,
    )
    for name in (VLLM_MODULE, RING_MODULE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # to be forgotten
        del sys.modules[name]
    vllm_module = importlib.import_module(VLLM_MODULE)
    monkeypatch.setattr(vllm_module, "_copy_page_indices_kernel", CopyPageIndices())
    return importlib.import_module(RING_MODULE)
