# SPDX-License-Identifier: Apache-2.0
"""The in-place view in one launch, for GPUs. Not yet run on one.

Needs torch and Triton, not vLLM. ``view.view_reference`` says what it computes.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _view(
    table,
    table_stride,
    seq_lens,
    query_start,
    out_table,
    out_stride,
    out_lens,
    last_column,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
):
    row = tl.program_id(0)
    length = tl.load(seq_lens + row)
    start = tl.load(query_start + row)
    first_query = length - (tl.load(query_start + row + 1) - start)
    base = tl.maximum(first_query - WINDOW + 1, 0) // BLOCK_SIZE
    slot = tl.arange(0, R_PADDED)
    column = tl.minimum(base + slot, last_column)
    mask = slot < R
    block = tl.load(table + row * table_stride + column, mask=mask, other=0)
    tl.store(out_table + row * out_stride + slot, block, mask=mask)
    tl.store(out_lens + row, length - base * BLOCK_SIZE)


def view_fused(
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    out_table: torch.Tensor,
    out_lens: torch.Tensor,
    window: int,
    block_size: int,
) -> None:
    """:func:`view_reference` as one kernel."""
    rows, ring = out_table.shape
    if rows == 0:
        return
    _view[(rows,)](
        table,
        table.stride(0),
        seq_lens,
        query_start,
        out_table,
        out_table.stride(0),
        out_lens,
        table.shape[1] - 1,
        WINDOW=window,
        BLOCK_SIZE=block_size,
        R=ring,
        R_PADDED=triton.next_power_of_2(ring),
    )
