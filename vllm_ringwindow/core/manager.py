# SPDX-License-Identifier: Apache-2.0
"""Who owns which ring block: the KV cache manager of one sliding-window group.

``req_to_blocks[request]`` is indexed by logical block, as in stock vLLM. Only the
last ``R`` entries (the ring) and, for one step, shared or retained ones are
physical; the rest is the null block::

    W=8, block_size=4, R=3, prompt of 26 tokens in one chunk, then decode

    allocate 26 tokens   [ -  -  -  -  a  b  c ]        3 fresh; 0..3 never get one
    allocate 29 tokens   [ -  -  -  - (a) b  c  a ]     7 takes over 4's block
    next call            [ -  -  -  -  -  b  c  a ]     (a) was nulled: I2

The entry in parentheses is *lent*: until the step just scheduled has been handed to
the worker the old position still names the block, because a request that enters the
batch with its whole list (a streaming session's next chunk) reads its context there.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.request import Request

from vllm_ringwindow.core.spec import RingWindowSpec
from vllm_ringwindow.geometry import cdiv


class _Growth(NamedTuple):
    """The logical blocks that one ``allocate_new_blocks`` call added."""

    request_id: str
    first: int  # first logical block added
    ring_first: int  # first one that is in the ring: max(first, required - R)
    new_blocks: list[KVCacheBlock]  # the list handed to the scheduler


class _Plan(NamedTuple):
    """How a request grows."""

    ring_first: int  # first new logical block in the ring
    recycled: list[int]  # logical blocks whose physical ones move on
    num_fresh: int  # blocks to take from the pool


@dataclass(slots=True)
class _Ring:
    """What one request holds in one group, beside its blocks."""

    num_behind: int = 0  # logical blocks behind the window when last swept
    unswept: bool = False  # has grown since then
    first_held: int = 0  # lowest logical block that may still be physical
    last_shared: int = -1  # highest logical block that may be hashed or shared
    hashed_all: bool = False  # no later block will be hashed
    # Logical blocks whose physical block moved on in the last allocation.
    lent: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Counts:
    """Blocks of one group: what it holds now, and what has passed since start-up."""

    held: int = 0  # physical blocks held, shared ones once per request
    fresh: int = 0  # taken from the pool
    recycled: int = 0  # moved on to a later position in place
    retained: int = 0  # of the fresh: for a prefix to be hit, not for the window
    released: int = 0  # given back, by a ring or by a request that left
    deferred: int = 0  # times a request waited a step for a prefix being written


class Rest(NamedTuple):
    """Up to where a ring has nothing to do for a request, in tokens."""

    slots: int  # tokens that have slots
    leaves: int  # processed tokens at which the window leaves a block behind
    fills: int  # tokens at which a block is full and may be hashed


class RingBlockManager(SlidingWindowManager):
    """Keeps ``R`` blocks per request and recycles them in place.

    Against the stock manager: a block that left the window is not returned to the
    pool but becomes the next logical block, if it is writable (one owner, no hash);
    blocks of a prefill chunk that the window will never reach again get no physical
    block at all, unless prefix caching retains them and the pool can spare one.
    """

    kv_cache_spec: RingWindowSpec

    def __init__(self, kv_cache_spec: RingWindowSpec, **kwargs) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.num_ring_blocks = kv_cache_spec.num_ring_blocks
        # Tokens below the window of the next query, W - 1 before it, are not held.
        self._num_kept = self.sliding_window - 1 + self.extra_retained_tokens
        self._rings: dict[str, _Ring] = {}
        # What the allocation in progress added, until its blocks are cached.
        self._growth: _Growth | None = None
        # Blocks hashed in this step: their content exists after the step only.
        self._published: set[int] = set()
        self.counts = Counts()

    # -- planning: the same function behind the count and the allocation (I1) -----

    def _ring(self, request_id: str) -> _Ring:
        ring = self._rings.get(request_id)
        if ring is None:
            ring = self._rings[request_id] = _Ring()
        return ring

    def _recyclable(self, request_id: str, end: int) -> list[int]:
        """Logical blocks below ``end`` whose physical block may be overwritten."""
        blocks = self.req_to_blocks[request_id]
        writable = self.block_pool.is_block_writable
        first = self._ring(request_id).first_held
        return [i for i in range(first, min(end, len(blocks))) if writable(blocks[i])]

    def _plan(self, request_id: str, required: int) -> _Plan:
        """How a request grows to ``required`` logical blocks."""
        held = len(self.req_to_blocks[request_id])
        ring_first = max(held, required - self.num_ring_blocks)
        num_new = required - ring_first
        recycled = self._recyclable(request_id, required - self.num_ring_blocks)
        recycled = recycled[:num_new]
        return _Plan(ring_first, recycled, num_new - len(recycled))

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
        **kwargs,
    ) -> int:
        """Blocks the pool must have free: fresh ones plus evictable prefix hits.

        Example (W=8, block 4, R=3): a new request of 26 tokens takes 3, its decode
        steps 0; with a hit of 16 tokens whose last 2 blocks are in the window and
        unreferenced it takes 3 + 2.
        """
        required = cdiv(num_tokens, self.block_size)
        if blocks := self.req_to_blocks.get(request_id):
            if required <= len(blocks):
                return 0
            if not apply_admission_cap:
                return self._plan(request_id, required).num_fresh
            physical = len({b.block_id for b in blocks if not b.is_null})
            return self._capped(physical, required - len(blocks)) - physical

        skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        hits = new_computed_blocks[skipped:]
        if self.hit_is_pending(new_computed_blocks, total_computed_tokens):
            # Ask for more than the pool has, as MambaManager does: wait a step.
            return self.block_pool.num_gpu_blocks + 1
        num_new = max(0, required - max(skipped, len(new_computed_blocks)))
        if apply_admission_cap:
            num_new = self._capped(len(hits), num_new) - len(hits)
        else:
            num_new = min(num_new, self.num_ring_blocks)
        return num_new + self._get_num_evictable_blocks(hits)

    def hit_is_pending(
        self, new_computed_blocks: Sequence[KVCacheBlock], total_computed_tokens: int
    ) -> bool:
        """Whether a hit was hashed by a request scheduled in this very step (I8).

        Its blocks are filled at the end of each layer's prefill, too late for others.
        """
        skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        pending = any(
            b.block_id in self._published for b in new_computed_blocks[skipped:]
        )
        self.counts.deferred += pending
        return pending

    def _capped(self, physical: int, num_more: int) -> int:
        """Most blocks a request that holds ``physical`` will hold at once."""
        cap = self.max_admission_blocks_per_request
        return max(physical, min(physical + num_more, cap or physical + num_more))

    # -- the life of a request ---------------------------------------------------

    def add_local_computed_blocks(self, request_id: str, *args, **kwargs) -> None:
        super().add_local_computed_blocks(request_id, *args, **kwargs)
        blocks = self.req_to_blocks[request_id]
        ring = self._ring(request_id)
        ring.last_shared = len(blocks) - 1
        ring.first_held = next(
            (i for i, b in enumerate(blocks) if not b.is_null), len(blocks)
        )
        self.counts.held += len(blocks) - ring.first_held

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Return what no query will read again and the ring cannot reuse.

        Runs before every allocation. Below the ring that is every block; inside the
        ring, behind the window, only shared and hashed ones: the writable ones wait
        to be recycled. Nothing that the coming chunk reads is released (I5).
        """
        ring = self._rings.get(request_id)
        if ring is None:
            return
        num_behind = (processed_computed_tokens - self._num_kept) // self.block_size
        if not ring.unswept and (
            num_behind <= ring.num_behind or ring.num_behind > ring.last_shared
        ):
            return
        ring.num_behind, ring.unswept = max(num_behind, 0), False
        blocks = self.req_to_blocks[request_id]
        for i in ring.lent:
            blocks[i] = self._null_block
        ring.lent.clear()
        below_ring = len(blocks) - self.num_ring_blocks
        released = []
        for i in range(ring.first_held, max(below_ring, min(num_behind, len(blocks)))):
            block = blocks[i]
            if block.is_null:
                continue
            if i < below_ring or not self.block_pool.is_block_writable(block):
                released.append(block)
                blocks[i] = self._null_block
        if released:
            self.block_pool.free_blocks(reversed(released))
            self.counts.released += len(released)
            self.counts.held -= len(released)
        ring.first_held = max(ring.first_held, below_ring)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int, **kwargs
    ) -> list[KVCacheBlock]:
        """Grow to ``num_tokens``: null blocks below the ring, then the ring.

        Returns:
            The blocks to append to the worker's row: a recycled block appears again
            under its new position, a block of the chunk outside the ring is null.
        """
        self._growth = None
        blocks = self.req_to_blocks[request_id]
        required = cdiv(num_tokens, self.block_size)
        first = len(blocks)
        if required <= first:
            return []
        ring_first, recycled, num_fresh = self._plan(request_id, required)
        new_blocks = [self._null_block] * (ring_first - first)
        new_blocks += [blocks[i] for i in recycled]
        new_blocks += self._fresh_blocks(num_fresh)
        blocks.extend(new_blocks)
        self.counts.recycled += len(recycled)
        ring = self._ring(request_id)
        ring.unswept = True
        ring.lent = recycled
        self._growth = _Growth(request_id, first, ring_first, new_blocks)
        return new_blocks

    def _fresh_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        if num_blocks == 0:
            return []
        fresh = self.block_pool.get_new_blocks(num_blocks)
        self.counts.fresh += num_blocks
        self.counts.held += num_blocks
        if self._record_new_block_ids:
            self.new_block_ids.extend(b.block_id for b in fresh)  # I11: fresh only
        return fresh

    def rest(self, request_id: str) -> Rest | None:
        """Until when the other calls do nothing for a request; None: do call."""
        ring = self._rings.get(request_id)
        if ring is None or ring.unswept or not self.kv_cache_spec.ring.rest:
            return None
        size = self.block_size
        hashed = self.num_cached_block.get(request_id, 0)
        leaves = fills = sys.maxsize
        if ring.num_behind <= ring.last_shared:
            leaves = (ring.num_behind + 1) * size + self._num_kept
        if self.enable_caching and not ring.hashed_all:
            fills = (hashed + 1) * size
        slots = len(self.req_to_blocks[request_id]) * size
        return Rest(slots=slots, leaves=leaves, fills=fills)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        ring = self._rings.pop(request_id, None)
        if ring is not None:
            # Before they are popped: vLLM 0.33 leaves out leading null blocks.
            for i in ring.lent:
                self.req_to_blocks[request_id][i] = self._null_block
        blocks = super().pop_blocks_for_free(request_id)
        if ring is not None:
            held = sum(not block.is_null for block in blocks)
            self.counts.released += held
            self.counts.held -= held
        return blocks

    # -- prefix caching ----------------------------------------------------------

    def new_step_starts(self) -> None:
        if self.kv_cache_spec.ring.check:
            self.check_integrity()
        self._published.clear()

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
        **kwargs,
    ) -> None:
        """Hash full blocks, as stock does, once retained ones are physical (I9)."""
        growth, self._growth = self._growth, None
        first = self.num_cached_block.get(request.request_id, 0)
        if num_tokens < (first + 1) * self.block_size:
            return
        if self._past_boundaries(request, first, retention_interval, replay_boundaries):
            self._ring(request.request_id).hashed_all = True
            self.num_cached_block[request.request_id] = num_tokens // self.block_size
            return
        if growth is not None and growth.request_id == request.request_id:
            wanted = self._retained_without_block(
                request,
                growth,
                first,
                num_tokens // self.block_size,
                retention_interval,
                replay_boundaries,
            )
            self._give_blocks(growth, wanted)
        # A block still lent is on its way to a later position: no hash for this one.
        blocks = self.req_to_blocks[request.request_id]
        lent = self._lent_blocks(request.request_id)
        for i in lent:
            blocks[i] = self._null_block
        super().cache_blocks(
            request,
            num_tokens,
            retention_interval,
            replay_boundaries=replay_boundaries,
            **kwargs,
        )
        last = self.num_cached_block.get(request.request_id, 0)
        for i, block in enumerate(blocks[first:last], first):
            if block.block_hash is not None:
                self._published.add(block.block_id)
                self._ring(request.request_id).last_shared = i
        for i, block in lent.items():
            blocks[i] = block

    def _past_boundaries(
        self,
        request: Request,
        first: int,
        retention_interval: int | None,
        replay_boundaries: Sequence[int],
    ) -> bool:
        """Whether ``reachable_block_mask`` retains nothing from block ``first`` on."""
        if retention_interval != 0 or self.cache_hit_alignment_tokens % self.block_size:
            return False
        last = max((*replay_boundaries, request.shared_prefix_boundary or 0))
        return first > last // self.block_size + 1  # EAGLE keeps one block above

    def _lent_blocks(self, request_id: str) -> dict[int, KVCacheBlock]:
        blocks = self.req_to_blocks[request_id]
        return {i: blocks[i] for i in self._ring(request_id).lent}

    def _retained_without_block(
        self,
        request: Request,
        growth: _Growth,
        first: int,
        end: int,
        retention_interval: int | None,
        replay_boundaries: Sequence[int],
    ) -> list[int]:
        """Logical blocks that stock would retain and the ring gave up or skipped."""
        lent = self._ring(growth.request_id).lent
        end = min(end, growth.ring_first)
        candidates = [i for i in range(first, end) if i >= growth.first or i in lent]
        if not candidates:
            return []
        boundaries = [*replay_boundaries]
        if request.shared_prefix_boundary:
            boundaries.append(request.shared_prefix_boundary)
        mask = self.reachable_block_mask(
            start_block=first,
            end_block=end,
            alignment_tokens=self.cache_hit_alignment_tokens,
            kv_cache_spec=self.kv_cache_spec,
            use_eagle=self.use_eagle,
            retention_interval=retention_interval,
            reachable_boundaries=boundaries,
            dcp_world_size=self.dcp_world_size,
        )
        return [i for i in candidates if mask is None or mask[i - first]]

    def _give_blocks(self, growth: _Growth, wanted: list[int]) -> None:
        """Make retained logical blocks physical, as far as the pool can spare them.

        They hold their place for one step: the next call releases them, hashed, as
        eviction candidates. Every group has what it must have by now, and one block
        per request is left for those scheduled after this one, so a retained block
        never costs a request its turn. The latest go first: a hit needs the run of
        blocks that ends at its boundary.
        """
        spare = self.block_pool.get_num_free_blocks() - len(self.req_to_blocks)
        wanted = wanted[len(wanted) - min(len(wanted), max(spare, 0)) :]
        if not wanted:
            return
        blocks = self.req_to_blocks[growth.request_id]
        ring = self._ring(growth.request_id)
        self.counts.retained += len(wanted)
        for i, fresh in zip(wanted, self._fresh_blocks(len(wanted))):
            if i in ring.lent:
                # Keep the content where it is; the new position takes the fresh one.
                ring.lent.remove(i)
                i = blocks.index(blocks[i], growth.ring_first)
            blocks[i] = fresh
            growth.new_blocks[i - growth.first] = fresh
        ring.first_held = min(ring.first_held, wanted[0])

    # -- for tests and for whoever looks into a running engine ---------------------

    @property
    def num_rings(self) -> int:
        """Requests that hold a ring here."""
        return len(self._rings)

    def num_logical(self, request_id: str) -> int:
        """Logical blocks of a request, null ones included."""
        return len(self.req_to_blocks.get(request_id, ()))

    def num_held(self, request_id: str) -> int:
        return len(self.held_blocks(request_id))

    def held_blocks(self, request_id: str) -> dict[int, KVCacheBlock]:
        """Logical block -> physical one, without those that moved on."""
        ring = self._rings.get(request_id)
        lent = ring.lent if ring is not None else ()
        blocks = self.req_to_blocks.get(request_id, ())
        return {
            i: block
            for i, block in enumerate(blocks)
            if not block.is_null and i not in lent
        }

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless I1, I2 and I4 hold for every request."""
        held = 0
        owners: dict[int, int] = {}
        for request_id, blocks in self.req_to_blocks.items():
            lent = self._ring(request_id).lent
            physical = list(self.held_blocks(request_id).values())
            held += len(physical)
            ids = [b.block_id for b in physical]
            assert len(ids) == len(set(ids)), f"I2: {request_id} holds a block twice"
            private = [b for b in physical if b.block_hash is None]
            assert len(private) <= self.num_ring_blocks, (
                f"I1: {request_id} holds {len(private)} private blocks, "
                f"R={self.num_ring_blocks}"
            )
            for i in lent:
                assert blocks[i] in blocks[i + 1 :], f"I4: {request_id} lost block {i}"
            for block in physical:
                owners[block.block_id] = owners.get(block.block_id, 0) + 1
                if block.block_hash is None:
                    assert block.ref_cnt == 1, f"I4: {block} has a second owner"
        for block_id, count in owners.items():
            ref_cnt = self.block_pool.blocks[block_id].ref_cnt
            assert ref_cnt >= count, f"I2: block {block_id}: {count} owners, {ref_cnt}"
        assert held == self.counts.held, f"holds {held} blocks, counted {self.counts}"
