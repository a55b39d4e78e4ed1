# SPDX-License-Identifier: Apache-2.0
"""A sliding window kept in a ring, in the fewest lines that are still exact.

``RingKV`` is the idea (data stays, an index moves), ``ShiftKV`` the plain array it
replaces, ``attend`` plain attention. They are the oracle of the tests; run them
first. Shapes: T tokens, C slots, Q queries, H KV heads, N query heads, D head size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_ringwindow.geometry import slot, start_slot, visible


class Entries(NamedTuple):
    """K/V of consecutive tokens, oldest to newest."""

    positions: Tensor  # [T] absolute
    k: Tensor  # [T, H, D]
    v: Tensor  # [T, H, D]


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _check_chunk(k: Tensor, v: Tensor, held: Tensor) -> None:
    shape = (len(k), *held.shape[1:])
    for name, x in (("k", k), ("v", v)):
        _require(x.shape == shape, f"{name} must be {shape}, got {tuple(x.shape)}")


def _check_query(current_pos: int, window: int) -> None:
    _require(current_pos >= 0, f"current_pos must not be negative, got {current_pos}")
    _require(window >= 1, f"window must be at least 1, got {window}")


class RingKV:
    """K/V of one sequence in a fixed ring of ``capacity`` slots (default: window).

    Slot = position mod capacity: sliding is O(1), memory O(capacity). ``capacity -
    window`` is how many tokens a full ring can roll back. One ring per sequence.
    ValueError if ``window`` is below 1 or ``capacity`` below ``window``.
    """

    def __init__(
        self,
        window: int,
        num_kv_heads: int,
        head_size: int,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        capacity = window if capacity is None else capacity
        _require(window >= 1, f"window must be at least 1, got {window}")
        _require(capacity >= window, f"capacity must be >= {window}, got {capacity}")
        self.window = window
        self.capacity = capacity
        self.num_tokens = 0
        self.k = torch.zeros(capacity, num_kv_heads, head_size, dtype=dtype)
        self.v = torch.zeros_like(self.k)  # both [C, H, D]
        self.positions = torch.full((capacity,), -1)  # [C] absolute, -1 when empty

    @property
    def start(self) -> int:
        """Slot of the oldest key that the newest token's query may see."""
        return start_slot(self.num_tokens - 1, self.window, self.capacity)

    def push(self, k: Tensor, v: Tensor) -> None:
        """Write T >= 0 tokens, [T, H, D] each, over the oldest slots.

        Of a chunk longer than the ring only its last C tokens stay: see ``prefill``.
        """
        _check_chunk(k, v, self.k)
        first, self.num_tokens = self.num_tokens, self.num_tokens + len(k)
        positions = torch.arange(first, self.num_tokens)[-self.capacity :]
        slots = slot(positions, self.capacity)
        self.k[slots] = k[-self.capacity :].to(self.k.dtype)
        self.v[slots] = v[-self.capacity :].to(self.v.dtype)
        self.positions[slots] = positions

    def prefill(self, k: Tensor, v: Tensor) -> Entries:
        """Push a chunk of any length; return what its queries may see.

        This is staging: the context (up to W - 1 tokens) is taken from the ring
        before the chunk, which follows it in the result, overwrites it.
        """
        context = self._walk(self.num_tokens, self.window, self.num_tokens)
        self.push(k, v)
        stop = self.num_tokens
        return Entries(
            torch.cat([context.positions, torch.arange(stop - len(k), stop)]),
            torch.cat([context.k, k.to(self.k.dtype)]),
            torch.cat([context.v, v.to(self.v.dtype)]),
        )

    def read(self, current_pos: int, window: int) -> Entries:
        """What the query at ``current_pos`` sees, a gathered copy, oldest to newest.

        ValueError if a position it needs was overwritten or never written. To attend
        without a copy use ``k``, ``v`` and ``decode_mask``.
        """
        _check_query(current_pos, window)
        return self._walk(current_pos, window, current_pos + 1)

    def decode_mask(self, current_pos: int, window: int) -> Tensor:
        """[C] bool over slots: written and ``0 <= current_pos - pos < window``."""
        _check_query(current_pos, window)
        in_window = visible(torch.tensor(current_pos), self.positions, window)
        return in_window & (self.positions >= 0)

    def roll_back(self, n: int) -> None:
        """Forget the last ``n`` tokens (rejected speculative ones).

        ValueError, and no change, if the window of the last token left is no longer
        whole: in a full ring ``n > capacity - window``.
        """
        _require(0 <= n <= self.num_tokens, f"n must be 0..{self.num_tokens}, got {n}")
        stop = self.num_tokens - n
        needed = torch.arange(max(0, stop - self.window), stop)
        _require(
            torch.equal(self.positions[slot(needed, self.capacity)], needed),
            f"n={n} needs tokens that capacity={self.capacity} has overwritten",
        )
        self.positions[self.positions >= stop] = -1
        self.num_tokens = stop

    def _walk(self, query_pos: int, window: int, stop: int) -> Entries:
        """The window of the query at ``query_pos``, below ``stop``, from its start."""
        needed = torch.arange(max(0, query_pos - window + 1), stop)
        first = start_slot(query_pos, window, self.capacity)
        slots = slot(first + torch.arange(len(needed)), self.capacity)
        found = self.positions[slots]
        _require(
            torch.equal(found, needed),
            f"current_pos={query_pos} with window={window} needs a position that was "
            "overwritten or never written",
        )
        return Entries(found, self.k[slots], self.v[slots])


class ShiftKV:
    """The plain array: the last ``window + slack`` tokens, copied at every push.

    Methods, shapes and errors as ``RingKV``'s with ``capacity = window + slack``.
    """

    def __init__(
        self, window: int, num_kv_heads: int, head_size: int, slack: int = 0
    ) -> None:
        _require(window >= 1, f"window must be at least 1, got {window}")
        _require(slack >= 0, f"slack must not be negative, got {slack}")
        self.window = window
        self.capacity = window + slack
        self.k = torch.zeros(0, num_kv_heads, head_size)
        self.v = torch.zeros_like(self.k)  # both [T, H, D]
        self.positions = torch.arange(0)  # [T] absolute

    def push(self, k: Tensor, v: Tensor) -> None:
        """Append T tokens, [T, H, D] each, and shift the oldest ones out."""
        _check_chunk(k, v, self.k)
        first = self.positions[-1].item() + 1 if len(self.positions) else 0
        positions = torch.arange(first, first + len(k))
        self.k = torch.cat([self.k, k])[-self.capacity :]
        self.v = torch.cat([self.v, v])[-self.capacity :]
        self.positions = torch.cat([self.positions, positions])[-self.capacity :]

    def read(self, current_pos: int, window: int) -> Entries:
        """What the query at ``current_pos`` sees, oldest to newest."""
        _check_query(current_pos, window)
        keep = (self.positions <= current_pos) & (self.positions > current_pos - window)
        _require(
            int(keep.sum()) == min(window, current_pos + 1),
            f"current_pos={current_pos} with window={window} needs a position that was "
            "shifted out or never written",
        )
        return Entries(self.positions[keep], self.k[keep], self.v[keep])

    def roll_back(self, n: int) -> None:
        """Forget the last ``n`` tokens; errors as ``RingKV.roll_back``."""
        held = len(self.positions)
        oldest = int(self.positions[0]) if held else 0
        _require(0 <= n <= oldest + held, f"n must be 0..{oldest + held}, got {n}")
        room = held if oldest == 0 else held - self.window
        _require(n <= room or n == oldest + held, f"n={n} exceeds {room} tokens held")
        keep = max(0, held - n)
        self.k, self.v = self.k[:keep], self.v[:keep]
        self.positions = self.positions[:keep]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Plain softmax attention in ``dtype``: q [Q, N, D], k and v [T, H, D].

    Query head n uses KV head n // (N // H). ``mask`` is bool, true where visible,
    broadcastable to [Q, T]. Returns [Q, N, D]. ValueError if N is no multiple of H
    or some query sees nothing.
    """
    group, rest = divmod(q.shape[1], k.shape[1])
    _require(rest == 0, f"q has {q.shape[1]} heads, not a multiple of {k.shape[1]}")
    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qnd,tnd->nqt", q.to(dtype), k) * scale
    if mask is not None:
        blind = ~mask.expand(len(q), len(k))
        _require(not blind.all(-1).any(), "mask hides every key from some query")
        scores = scores.masked_fill(blind, -torch.inf)
    return torch.einsum("nqt,tnd->qnd", scores.softmax(-1), v)
