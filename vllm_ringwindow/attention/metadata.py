# SPDX-License-Identifier: Apache-2.0
"""From a batch's lengths and block-table rows to attention passes.

Shapes: ``T`` tokens and ``N`` requests of the batch, ``R`` ring blocks, ``n`` rows of
one pass, ``M`` block-table columns, ``S`` staging blocks.

A batch is cut into passes of consecutive rows, each one inner-backend call per layer:

* *in place*: the rows' windows and new tokens are all in the ring (every decode, every
  prompt that still fits). The kernel sees ``R`` gathered columns of each row and
  lengths rebased to the first of them.
* *staged*: prefill chunks that do not fit. Per layer: copy in the context, update the
  cache and attend in staging (an identity table), copy out what is physical.

Staged passes run first (I7).
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_ringwindow.attention.view import make_view
from vllm_ringwindow.geometry import (
    cdiv,
    chunk_blocks,
    context_blocks,
    fits_in_place,
    window_base,
)


@dataclass(frozen=True, kw_only=True)
class RingShape:
    """What one group's passes are made with."""

    window: int
    block_size: int
    num_ring_blocks: int
    num_lookahead: int  # slots the scheduler gives out beyond seq_len
    decode_threshold: int  # query tokens that are always in place: 1 + k
    num_staging_blocks: int
    keep_staging: bool  # other layers read it later in the step (KV sharing)
    num_null_blocks: int = 1  # kernel blocks of the null block


class ViewBuffers:
    """Where in-place views live: a captured CUDA graph reads the same addresses.

    Indexed by row of the batch; the passes of one step use different rows.
    """

    def __init__(self, max_rows: int, shape: RingShape, device: torch.device) -> None:
        ring = shape.num_ring_blocks
        self.table = torch.zeros(max_rows, ring, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)


@dataclass(frozen=True, kw_only=True)
class InPlacePass:
    tokens: slice  # of the batch's T
    slots: torch.Tensor  # [tokens] slots of the new tokens in the paged cache
    inner: Any  # the inner backend's metadata


@dataclass(frozen=True, kw_only=True)
class StagedPass:
    tokens: slice
    slots: torch.Tensor  # [tokens] slots of the new tokens in staging
    num_blocks: int  # staging blocks in use, those of earlier passes included
    copy_in_from: torch.Tensor  # ring blocks with context ...
    copy_in_to: torch.Tensor  # ... and where they go in staging
    copy_out_from: torch.Tensor  # staging blocks to keep ...
    copy_out_to: torch.Tensor  # ... and their physical blocks
    inner: Any


@dataclass
class RingMetadata:
    """One group's metadata for one step."""

    num_actual_tokens: int
    staged: list[StagedPass] = field(default_factory=list)
    in_place: list[InPlacePass] = field(default_factory=list)


@dataclass
class PassThroughMetadata:
    """The group is not on a ring: the inner backend as it is."""

    inner: Any
    slots: torch.Tensor  # [T]


@dataclass(frozen=True)
class RowGroup:
    """Consecutive rows ``[first, last)`` of the batch that run in one pass."""

    first: int
    last: int
    staged: bool


def group_rows(
    query_start: np.ndarray, seq_lens: np.ndarray, shape: RingShape
) -> list[RowGroup]:
    """Cut a batch into passes.

    Args:
        query_start: ``[N + 1]`` first token of each row.
        seq_lens: ``[N]`` tokens of each row including the new ones; exact for rows
            with more than ``decode_threshold`` query tokens, an upper bound else.
        shape: the group's geometry.
    """
    query_lens = np.diff(query_start)
    computed = seq_lens - query_lens
    staged = ~fits_in_place(
        computed,
        seq_lens,
        shape.window,
        shape.block_size,
        shape.num_ring_blocks,
        shape.num_lookahead,
    )
    # The kernel would read past the view: R is wrong, or the rows are.
    assert not (staged & (query_lens <= shape.decode_threshold)).any(), shape
    base = window_base(computed, shape.window, shape.block_size)
    blocks = cdiv(seq_lens, shape.block_size) - base
    groups: list[RowGroup] = []
    used = 0
    if not staged.any():
        return [RowGroup(0, len(seq_lens), False)]
    for row, is_staged in enumerate(staged.tolist()):
        last = groups[-1] if groups else None
        if (
            last is not None
            and last.staged == is_staged
            and (
                not is_staged
                or shape.keep_staging
                or used + blocks[row] <= shape.num_staging_blocks
            )
        ):
            groups[-1] = RowGroup(last.first, row + 1, is_staged)
            used += blocks[row]
        else:
            groups.append(RowGroup(row, row + 1, is_staged))
            used = blocks[row]
    return groups


def rows_of(common: CommonAttentionMetadata, group: RowGroup) -> dict[str, Any]:
    """The fields of ``common`` that describe its rows, cut to one group."""
    per_batch: dict[str, Any] = dict(
        positions=None,
        logits_indices_padded=None,
        num_logits_indices=None,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )
    if group.first == 0 and group.last == common.num_reqs:
        return per_batch | dict(num_actual_tokens=common.num_actual_tokens)
    rows = slice(group.first, group.last)
    bounds = common.query_start_loc_cpu[group.first : group.last + 1]
    start, stop = int(bounds[0]), int(bounds[-1])
    if group.last == common.num_reqs:
        stop = common.num_actual_tokens  # padding tokens ride with the last rows
    query_start = common.query_start_loc[group.first : group.last + 1]
    if start:  # else the runner's own, persistent buffer
        query_start, bounds = query_start - start, bounds - start
    return per_batch | dict(
        query_start_loc=query_start,
        query_start_loc_cpu=bounds,
        num_reqs=group.last - group.first,
        num_actual_tokens=stop - start,
        max_query_len=int((bounds[1:] - bounds[:-1]).max()),
        is_prefilling=None
        if common.is_prefilling is None
        else common.is_prefilling[rows],
        req_idx=None if common.req_idx is None else common.req_idx[rows],
    )


def in_place_view(
    common: CommonAttentionMetadata,
    group: RowGroup,
    shape: RingShape,
    buffers: ViewBuffers,
) -> CommonAttentionMetadata:
    """Rows of ``R`` gathered columns ``[n, R]`` and lengths rebased to the first.

    Everything is computed on the device from ``seq_lens`` and ``query_start_loc`` into
    ``buffers``. Rows that only pad a CUDA graph's batch have no tokens and stay so.
    """
    rows = slice(group.first, group.last)
    seq_lens = common.seq_lens[rows]
    query_start = common.query_start_loc[group.first : group.last + 1]
    view, rebased = buffers.table[rows], buffers.seq_lens[rows]
    make_view(
        common.block_table_tensor[rows],
        seq_lens,
        query_start,
        view,
        rebased,
        shape.window,
        shape.block_size,
    )
    fields = rows_of(common, group)
    start = int(common.query_start_loc_cpu[group.first])
    longest = shape.num_ring_blocks * shape.block_size
    if rebased.device.type == "cpu":
        # The kernel would read past the view: R is wrong, or the rows are.
        assert rebased.numpy().max(initial=0) <= longest, shape
    if common.seq_lens_cpu_upper_bound is not None:
        # Rebased like the device's: exact where it is exact (FlashInfer plans by it).
        host = common.seq_lens_cpu_upper_bound[rows].numpy()
        bounds = common.query_start_loc_cpu[group.first : group.last + 1].numpy()
        base = window_base(host - np.diff(bounds), shape.window, shape.block_size)
        host = host - base * shape.block_size
        fields["seq_lens_cpu_upper_bound"] = torch.from_numpy(host)
    return common.replace(
        **fields,
        seq_lens=rebased,
        max_seq_len=min(common.max_seq_len, longest),
        block_table_tensor=view,
        slot_mapping=common.slot_mapping[start : start + fields["num_actual_tokens"]],
    )


def staged_view(
    common: CommonAttentionMetadata,
    group: RowGroup,
    seq_lens: np.ndarray,
    shape: RingShape,
    first_block: int = 0,
) -> tuple[CommonAttentionMetadata, dict[str, torch.Tensor], int]:
    """An identity table over staging, and the block copies around it.

    Row ``r``'s logical blocks from its window base on lie one after the other in
    staging, from ``offset[r]``.

    Args:
        common: the batch.
        group: the rows.
        seq_lens: ``[N]`` exact lengths of the batch's prefill rows (host).
        shape: the group's geometry.
        first_block: where in staging to begin.

    Returns:
        The inner backend's view, the four copy index tensors of
        :class:`StagedPass`, and the staging blocks in use up to the pass's end.
    """
    bs = shape.block_size
    bounds = common.query_start_loc_cpu[group.first : group.last + 1].numpy()
    lens = seq_lens[group.first : group.last].astype(np.int64)
    query_lens = np.diff(bounds)
    computed = lens - query_lens
    base = window_base(computed, shape.window, bs)
    num_blocks = cdiv(lens, bs) - base
    offset = first_block + np.concatenate(([0], np.cumsum(num_blocks)))
    device = common.block_table_tensor.device

    def spread(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows and logical blocks of ``first[r] .. last[r]`` of every row."""
        count = np.maximum(last - first, 0)
        rows = np.repeat(np.arange(len(count)), count)
        steps = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        return rows, first[rows] + steps

    def physical(rows: np.ndarray, logical: np.ndarray) -> torch.Tensor:
        index = torch.from_numpy(rows + group.first).to(device)
        return common.block_table_tensor[index, torch.from_numpy(logical).to(device)]

    def staged(rows: np.ndarray, logical: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(offset[rows] + logical - base[rows]).to(device)

    in_rows, in_blocks = spread(*context_blocks(computed, shape.window, bs))
    copy_in_from = physical(in_rows, in_blocks)

    first_chunk, end_chunk = chunk_blocks(computed, lens, bs)
    out_rows, out_blocks = spread(first_chunk, end_chunk)
    copy_out_to = physical(out_rows, out_blocks)
    # A row is append-only: a block that the chunk began in, or that rejected drafts
    # left behind, may since belong to a later position of the row. The last owns it.
    key = (torch.from_numpy(out_rows).to(device) << 32) | copy_out_to.long()
    order = torch.argsort(key, stable=True)
    owns = torch.ones_like(key, dtype=torch.bool)
    owns[order[:-1]] = key[order[:-1]] != key[order[1:]]
    keep = owns & (copy_out_to >= shape.num_null_blocks)
    copy_out_from = staged(out_rows, out_blocks)
    if device.type == "cpu":
        copy_out_from, copy_out_to = copy_out_from[keep], copy_out_to[keep]
    else:
        # Selecting would wait for the device. What is not kept goes to the null block,
        # which nobody reads: more is copied there than must be.
        copy_out_to = torch.where(keep, copy_out_to, 0)

    width = int(num_blocks.max())
    table = torch.from_numpy(offset[:-1, None] + np.arange(width)).to(
        device, common.block_table_tensor.dtype
    )
    token_rows = np.repeat(np.arange(len(lens)), query_lens)
    in_chunk = np.arange(query_lens.sum()) - np.repeat(
        bounds[:-1] - bounds[0], query_lens
    )
    slots = (
        (offset[token_rows] - base[token_rows]) * bs + computed[token_rows] + in_chunk
    )

    fields = rows_of(common, group)
    slot_mapping = common.slot_mapping.new_full((fields["num_actual_tokens"],), -1)
    slot_mapping[: len(slots)] = torch.from_numpy(slots).to(device)
    rebased = lens - base * bs
    view = common.replace(
        **fields,
        seq_lens=torch.from_numpy(rebased).to(device, common.seq_lens.dtype),
        seq_lens_cpu_upper_bound=torch.from_numpy(rebased.astype(np.int32)),
        max_seq_len=int(rebased.max()),
        block_table_tensor=table.clamp_(max=max(int(offset[-1]) - 1, 0)),
        slot_mapping=slot_mapping,
    )
    copies = dict(
        copy_in_from=copy_in_from,
        copy_in_to=staged(in_rows, in_blocks),
        copy_out_from=copy_out_from,
        copy_out_to=copy_out_to,
    )
    return view, copies, int(offset[-1])
