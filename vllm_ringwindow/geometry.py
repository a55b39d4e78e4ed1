# SPDX-License-Identifier: Apache-2.0
"""Where a sliding window lives inside a ring of fixed blocks.

Pure functions without vLLM; the block arithmetic takes ints, NumPy arrays and torch
tensors alike. Read this file first; everything else names it.

Symbols: ``W`` window in tokens, counting the current one (query ``p`` sees keys
``p-W+1 .. p``); ``bs`` block size in tokens; ``R`` ring blocks a request holds in
one sliding-window group; logical block ``i`` = tokens ``[i*bs, (i+1)*bs)``.

One request, one group, W=8, bs=4, R=3, 27 tokens so far::

    logical block      0    1    2    3    4    5    6
    scheduler's list   -    -    -    -    b    c    a    3 distinct blocks
    worker's row       a    b    c    a    b    c    a    append-only, old ones stale
    decode view                            b    c    a    base 4, seq_len 27-16 = 11

The query at position 26 sees keys 19 .. 26, that is logical blocks 4 .. 6. When
position 28 is scheduled, logical block 7 takes over the physical block of logical
block 7 - R = 4, in place: nothing is copied, only the index moves.
"""

from typing import Any, TypeVar

IntOrTensor = TypeVar("IntOrTensor", bound=Any)


def cdiv(a: IntOrTensor, b: int) -> IntOrTensor:
    """Ceiling of ``a / b`` for ``b > 0``."""
    return -(-a // b)


def slot(position: IntOrTensor, capacity: int) -> IntOrTensor:
    """Slot of an absolute position in a ring of ``capacity`` tokens.

    A slot is not a position: RoPE and ALiBi need the absolute one.
    """
    return position % capacity


def start_slot(last_position: int, window: int, capacity: int) -> int:
    """Slot of the oldest key that a query at ``last_position`` may see.

    With ``capacity == window`` and a full ring this is the slot that the next
    token overwrites.
    """
    return slot(max(0, last_position - window + 1), capacity)


def visible(
    query_position: IntOrTensor, key_position: IntOrTensor, window: int
) -> IntOrTensor:
    """The decode mask: true iff ``0 <= query - key < W`` (broadcasts on tensors)."""
    distance = query_position - key_position
    return (0 <= distance) & (distance < window)


def window_base(position: IntOrTensor, window: int, block_size: int) -> IntOrTensor:
    """First logical block that the window of the query at ``position`` touches."""
    oldest = position - window + 1
    return oldest * (oldest > 0) // block_size


def ring_blocks(window: int, block_size: int, roll_back: int = 0) -> int:
    """``R``: blocks such that no two logical blocks a query may read share one.

    ``roll_back`` counts the tokens between the oldest query that may still run and
    the newest token that may already have a slot (0 in plain decode): rejected
    speculative tokens, several query tokens per step, lookahead slots. The ``+ 1``
    is alignment: ``W - 1 + roll_back`` tokens before the newest one can touch one
    block more than they fill.

    Tight for blocks, which is what the scheduler owns, frees and hashes: with
    ``R - 1`` some alignment needs one physical block in two places. Single tokens
    collide with ``R - 1`` only where ``W - 1 + roll_back`` is a multiple of the
    block size.
    """
    return cdiv(window - 1 + roll_back, block_size) + 1


def context_blocks(
    num_computed: IntOrTensor, window: int, block_size: int
) -> tuple[IntOrTensor, IntOrTensor]:
    """First and last-plus-one logical block with context of a chunk.

    From the window of the chunk's first query, at ``num_computed``, to the block being
    filled (which is copied in even when W = 1, since copy-out writes whole blocks).
    Empty when nothing has been computed.
    """
    return (
        window_base(num_computed, window, block_size),
        cdiv(num_computed, block_size),
    )


def chunk_blocks(
    num_computed: IntOrTensor, seq_len: IntOrTensor, block_size: int
) -> tuple[IntOrTensor, IntOrTensor]:
    """First and last-plus-one logical block of tokens ``[num_computed, seq_len)``.

    Those with a physical block are copied out of staging.
    """
    return num_computed // block_size, cdiv(seq_len, block_size)


def fits_in_place(
    num_computed: IntOrTensor,
    seq_len: IntOrTensor,
    window: int,
    block_size: int,
    num_ring_blocks: int,
    num_lookahead: int = 0,
) -> IntOrTensor:
    """Whether a chunk may run on the ring itself, without staging.

    True iff every block from the first query's window to the last slot the
    scheduler gave out (``num_lookahead`` beyond ``seq_len``) is in the ring at once.
    Always true for decode; true for any prompt that still fits the ring.
    """
    base = window_base(num_computed, window, block_size)
    return cdiv(seq_len + num_lookahead, block_size) - base <= num_ring_blocks
