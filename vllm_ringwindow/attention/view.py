# SPDX-License-Identifier: Apache-2.0
"""The in-place view of a batch: window bases, gathered tables, rebased lengths.

Needs torch, not vLLM.
"""

import numpy as np
import torch

from vllm_ringwindow.geometry import window_base


def view_reference(
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    out_table: torch.Tensor,
    out_lens: torch.Tensor,
    window: int,
    block_size: int,
) -> None:
    """Gather each row's ``R`` columns from its window base on, and rebase its length.

    Args:
        table: ``[n, M]`` int32 block table.
        seq_lens: ``[n]`` int32.
        query_start: ``[n + 1]`` int32 first token of each row.
        out_table: ``[n, R]`` int32; written.
        out_lens: ``[n]`` int32; written.
        window: ``W``, tokens.
        block_size: tokens.
    """
    first_query = seq_lens - (query_start[1:] - query_start[:-1])
    base = window_base(first_query, window, block_size)
    columns = base.long()[:, None] + torch.arange(
        out_table.shape[1], device=table.device
    )
    columns.clamp_(max=table.shape[1] - 1)
    torch.gather(table, 1, columns, out=out_table)
    torch.sub(seq_lens, base, alpha=block_size, out=out_lens)


def view_on_host(
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    out_table: torch.Tensor,
    out_lens: torch.Tensor,
    window: int,
    block_size: int,
) -> None:
    """:func:`view_reference` for CPU tensors, a few microseconds in NumPy."""
    lens, starts, rows = seq_lens.numpy(), query_start.numpy(), table.numpy()
    base = window_base(lens - (starts[1:] - starts[:-1]), window, block_size)
    columns = base[:, None] + np.arange(out_table.shape[1])
    np.minimum(columns, rows.shape[1] - 1, out=columns)
    out_table.numpy()[:] = np.take_along_axis(rows, columns, 1)
    np.subtract(lens, base * block_size, out=out_lens.numpy())


def make_view(
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    out_table: torch.Tensor,
    out_lens: torch.Tensor,
    window: int,
    block_size: int,
) -> None:
    """:func:`view_reference`; on a GPU in one launch."""
    make = view_on_host if table.device.type == "cpu" else view_reference
    if table.device.type == "cuda":
        from vllm_ringwindow.attention.view_kernel import view_fused

        make = view_fused
    make(table, seq_lens, query_start, out_table, out_lens, window, block_size)
