# SPDX-License-Identifier: Apache-2.0
"""The worker's index arithmetic on rows that are hard to meet end to end."""

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_ringwindow.attention.metadata import (
    RingShape,
    group_rows,
    staged_view,
)
from vllm_ringwindow.attention.staging import Staging


def staged_copies(blocks, num_computed, num_tokens):
    """The copies of one staged chunk: W=9, block size 4, R=3, no drafts."""
    shape = RingShape(
        window=9,
        block_size=4,
        num_ring_blocks=3,
        num_lookahead=0,
        decode_threshold=1,
        num_staging_blocks=100,
        keep_staging=False,
    )
    lens = np.array([num_computed + num_tokens])
    bounds = torch.tensor([0, num_tokens], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=bounds,
        query_start_loc_cpu=bounds,
        seq_lens=torch.from_numpy(lens).int(),
        num_reqs=1,
        num_actual_tokens=num_tokens,
        max_query_len=num_tokens,
        max_seq_len=int(lens[0]),
        block_table_tensor=torch.tensor([blocks], dtype=torch.int32),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
    )
    (group,) = group_rows(bounds.numpy(), lens, shape)
    assert group.staged
    _, copies, _ = staged_view(common, group, lens, shape)
    return {name: tensor.tolist() for name, tensor in copies.items()}


def test_a_block_listed_twice_belongs_to_its_last_position():
    """The chunk begins in logical block 2, whose block 7 was recycled for block 5."""
    copies = staged_copies([5, 6, 7, 0, 0, 7, 8, 9], num_computed=10, num_tokens=22)
    assert copies["copy_in_from"] == [5, 6, 7]
    assert copies["copy_out_to"] == [7, 8, 9]
    assert copies["copy_out_from"] == [5, 6, 7]


def test_blocks_that_rejected_drafts_left_behind_are_no_exception():
    """Logical block 3 was held before the chunk too, and recycled for block 5."""
    copies = staged_copies([5, 6, 7, 9, 0, 9, 7, 8], num_computed=10, num_tokens=22)
    assert sorted(copies["copy_out_to"]) == [7, 8, 9]
    assert dict(zip(copies["copy_out_to"], copies["copy_out_from"])) == {
        9: 5,
        7: 6,
        8: 7,
    }


def test_a_block_kept_for_its_content_is_written_too():
    """The chunk's first block stays where it is (retained): all its tokens count."""
    copies = staged_copies([5, 6, 7, 0, 0, 4, 8, 9], num_computed=10, num_tokens=22)
    assert copies["copy_out_to"] == [7, 4, 8, 9]
    assert copies["copy_out_from"] == [2, 5, 6, 7]


def test_staging_that_grows_keeps_what_it_holds_and_adds_zeros():
    cache = torch.empty(10, 2, 4, 6)
    staging = Staging(torch.device("cpu"))
    staging.as_blocks_of(cache, 2).fill_(7.0)
    blocks = staging.as_blocks_of(cache, 3)
    assert (blocks[:2] == 7.0).all() and (blocks[2] == 0.0).all()
