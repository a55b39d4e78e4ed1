# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler with a worker that stores what it should, and checks it.

The planner, the scheduler, the coordinator and the managers are vLLM's and ours, for
real. The worker keeps one memory, shared by the groups as on a device, whose cells hold
*content ids* instead of K/V: the id of (layer, tokens up to here). "Attention" asserts
that every key position in a query's window holds the id it should. Passes and copies
come from ``vllm_ringwindow.attention.metadata``, in the impl's order.

This runs what the CPU build cannot (asynchronous scheduling), and finds a block read
too late, recycled too early or cached before it was written at the step it happens.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.harness import had_rings
from vllm_ringwindow.attention.metadata import (
    RingShape,
    ViewBuffers,
    group_rows,
    in_place_view,
    staged_view,
)
from vllm_ringwindow.attention.staging import staging_blocks
from vllm_ringwindow.compat import plan_kv_cache
from vllm_ringwindow.core.manager import RingBlockManager
from vllm_ringwindow.core.spec import RingParams, RingWindowSpec

VOCAB = 97


def make_config(
    model: Path, *, asynchronous: bool = False, **options: Any
) -> VllmConfig:
    values: dict[str, Any] = dict(
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=1 << 28,
        attention_backend="RING",
    )
    config = EngineArgs(model=str(model), **(values | options)).create_engine_config()
    # The CPU platform switches it off; the scheduler itself has no such limit.
    config.scheduler_config.async_scheduling = asynchronous
    return config


def make_specs(
    config: VllmConfig,
    windows: Sequence[int | None],
    block_size: int,
    *,
    ring: bool = True,
    block_sizes: Sequence[int] | None = None,
) -> dict[str, KVCacheSpec]:
    """One layer per entry of ``windows``; None is full attention."""
    specs: dict[str, KVCacheSpec] = {}
    for i, window in enumerate(windows):
        size = block_sizes[i] if block_sizes else block_size
        # Same page bytes for every block size, as unify_kv_cache_spec_page_size does.
        common: dict[str, Any] = dict(
            block_size=size,
            num_kv_heads=1,
            head_size=32 * block_size // size,
            dtype=torch.float32,
        )
        if window is None:
            specs[f"layers.{i}"] = FullAttentionSpec(**common)
            continue
        spec = SlidingWindowSpec(sliding_window=window, **common)
        if ring:
            spec = RingWindowSpec.from_sliding_window(
                spec, RingParams.from_config(config)
            )
        specs[f"layers.{i}"] = spec
    return specs


def plan(
    config: VllmConfig, specs: dict[str, KVCacheSpec], num_blocks: int
) -> KVCacheConfig:
    """vLLM's own planner on these specs, with ``num_blocks`` in the pool."""
    config.cache_config.num_gpu_blocks_override = num_blocks
    config.cache_config.kv_cache_layout = "LBHNC"  # as the CPU backend resolves it
    config.cache_config.num_gpu_blocks = num_blocks
    (kv_cache_config,) = plan_kv_cache(config, [specs], [1 << 40])
    return kv_cache_utils.generate_scheduler_kv_cache_config([kv_cache_config])


def least_blocks(config: VllmConfig, groups: Sequence[KVCacheGroupSpec]) -> int:
    """Blocks of the smallest pool that vLLM starts with (one is the null block)."""
    return 1 + sum(
        -(
            -g.kv_cache_spec.max_memory_usage_bytes(config)
            // g.kv_cache_spec.page_size_bytes
        )
        for g in groups
    )


def smallest_pool(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> int:
    """The same, for layers that are yet to be grouped."""
    return least_blocks(config, plan(config, specs, 100_000).kv_cache_groups)


@dataclass
class Row:
    """What the worker knows of one request."""

    tokens: list[int]
    ids: list[list[int]]  # [group][position] content ids
    blocks: list[list[int]]  # [group] its append-only row
    num_prompt: int
    drafts: list[int] = field(default_factory=list)  # the worker's own (asynchronous)


@dataclass
class Simulator:
    """Drives a scheduler over the checking worker."""

    config: VllmConfig
    kv_config: KVCacheConfig
    num_drafts: int = 0
    depth: int = 0  # batches in flight; 0: as many as the scheduler's kind has
    accept: Callable[[random.Random], float] = lambda rng: 0.5
    seed: int = 0
    rows: dict[str, Row] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    steps: list[SchedulerOutput] = field(default_factory=list)
    reads: int = 0  # key positions checked

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.asynchronous = bool(self.config.scheduler_config.async_scheduling)
        hash_fn = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(hash_fn)
        sizes = kv_cache_utils.resolve_kv_cache_block_sizes(self.kv_config, self.config)
        self.scheduler_block_size, hash_block_size = sizes[:2]
        self.hasher = kv_cache_utils.get_request_block_hasher(hash_block_size, hash_fn)
        scheduler_cls = AsyncScheduler if self.asynchronous else Scheduler
        self.scheduler = scheduler_cls(
            vllm_config=self.config,
            kv_cache_config=self.kv_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=self.scheduler_block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        self.kv = self.scheduler.kv_cache_manager
        self.pool = self.kv.block_pool
        self.managers = self.kv.coordinator.single_type_managers
        self.rings = [m for m in self.managers if isinstance(m, RingBlockManager)]
        had_rings.append(bool(self.rings))
        self.num_free_at_start = self.pool.get_num_free_blocks()
        self.specs = [g.kv_cache_spec for g in self.kv_config.kv_cache_groups]
        # Groups of a device share bytes; one layer of each aliases block by block.
        largest = max(spec.block_size for spec in self.specs)
        self.memory = torch.full((self.kv_config.num_blocks, largest), -1)
        self.shapes = [self._shape(spec) for spec in self.specs]
        self.peak: dict[int, int] = {}
        self._counter = itertools.count()

    def _shape(self, spec: KVCacheSpec) -> RingShape | None:
        if not isinstance(spec, RingWindowSpec):
            return None
        return RingShape(
            window=spec.sliding_window,
            block_size=spec.block_size,
            num_ring_blocks=spec.num_ring_blocks,
            num_lookahead=self.config.num_lookahead_tokens,
            decode_threshold=1 + self.config.num_speculative_tokens,
            num_staging_blocks=staging_blocks(
                self.config, spec.sliding_window, spec.block_size
            ),
            keep_staging=False,
        )

    # -- requests -------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        session: str | None = None,
        resumable: bool = False,
    ) -> str:
        """Add a request, or the next input of a streaming ``session``."""
        request_id = session or f"s{next(self._counter)}"
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                temperature=0, max_tokens=max_tokens, ignore_eos=True
            ),
            pooling_params=None,
            block_hasher=self.hasher,
            resumable=resumable,
        )
        self.outputs.setdefault(request_id, [])
        self.scheduler.add_request(request)
        return request_id

    def run(
        self,
        arrivals: Sequence[tuple[int, Sequence[int], int]],
        aborts: dict[int, int] | None = None,
        max_steps: int = 20_000,
    ) -> list[list[int]]:
        """Run requests ``(step, prompt, max_tokens)`` to the end.

        Args:
            arrivals: when each request is added, in order.
            aborts: request index -> step at which it is aborted.
            max_steps: more means that something starves.

        Returns:
            The sampled tokens of every request.
        """
        ids: list[str | None] = [None] * len(arrivals)
        in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        depth = self.depth or (2 if self.asynchronous else 1)
        for step in range(max_steps):
            for i, (at, prompt, max_tokens) in enumerate(arrivals):
                if at == step:
                    ids[i] = self.add(prompt, max_tokens)
            for i, at in (aborts or {}).items():
                if at == step and ids[i] is not None:
                    self.scheduler.finish_requests(
                        ids[i], RequestStatus.FINISHED_ABORTED
                    )
            pending = any(i is None for i in ids)
            if not pending and not self.scheduler.has_requests() and not in_flight:
                break
            output = self.scheduler.schedule()
            self.steps.append(output)
            for ring in self.rings:
                ring.check_integrity()
            self._check_bounds()
            if output.total_num_scheduled_tokens or output.finished_req_ids:
                in_flight.append((output, self.execute(output)))
                self._check_hashes()
            if len(in_flight) >= depth or not output.total_num_scheduled_tokens:
                if in_flight:
                    self._settle(*in_flight.popleft())
        else:
            raise AssertionError(f"not finished after {max_steps} steps")
        return [self.outputs[i] for i in ids if i is not None]

    def _settle(self, output: SchedulerOutput, model_output: ModelRunnerOutput) -> None:
        done = self.scheduler.update_from_output(output, model_output)
        for engine_outputs in done.values():
            for out in engine_outputs.outputs:
                self.outputs[out.request_id].extend(out.new_token_ids)
        if self.num_drafts and not self.asynchronous:
            known = self.scheduler.requests
            # With its last step returned, none of it in flight on another rank.
            ids = [
                i
                for i in output.num_scheduled_tokens
                if i in known
                and known[i].status == RequestStatus.RUNNING
                and known[i].num_computed_tokens < known[i].num_tokens
            ]
            drafts = [self._drafts(known[i].all_token_ids) for i in ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    def _drafts(self, known: Sequence[int]) -> list[int]:
        """Some right, then wrong ones: roll-back of every length."""
        tokens = list(known)
        drafts: list[int] = []
        for _ in range(self.num_drafts):
            right = next_token(tokens + drafts)
            wrong = (right + 1) % VOCAB
            drafts.append(right if self.rng.random() < self.accept(self.rng) else wrong)
        return drafts

    def _check_bounds(self) -> None:
        """I1: private and mandatory blocks per request and group."""
        for ring in self.rings:
            for blocks in ring.req_to_blocks.values():
                held = len({b.block_id for b in blocks if not b.is_null})
                self.peak[ring.kv_cache_group_id] = max(
                    held, self.peak.get(ring.kv_cache_group_id, 0)
                )
                if not ring.enable_caching:
                    assert held <= ring.max_admission_blocks_per_request

    def _check_hashes(self) -> None:
        """A hashed block holds the content its hash was made of."""
        for group, manager in enumerate(self.managers):
            size = self.specs[group].block_size
            for request_id, blocks in manager.req_to_blocks.items():
                ids = self.rows[request_id].ids[group]
                ring = getattr(manager, "_rings", {}).get(request_id)
                lent = ring.lent if ring else ()
                for i, block in enumerate(blocks):
                    if i in lent or block.is_null or block.block_hash is None:
                        continue
                    found = self.memory[block.block_id, :size].tolist()
                    assert found == ids[i * size : (i + 1) * size], (
                        f"group {group}: block {i} of {request_id} is hashed as what "
                        "it does not hold"
                    )

    # -- the worker -----------------------------------------------------------

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in output.finished_req_ids:
            self.rows.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            tokens = list(new.prompt_token_ids)
            self.rows[new.req_id] = Row(
                tokens,
                [[] for _ in self.specs],
                [list(b) for b in new.block_ids],
                len(tokens),
            )
        cached = output.scheduled_cached_reqs
        computed = {n.req_id: n.num_computed_tokens for n in output.scheduled_new_reqs}
        for i, request_id in enumerate(cached.req_ids):
            row = self.rows[request_id]
            computed[request_id] = cached.num_computed_tokens[i]
            blocks = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                assert blocks is not None
                row.blocks = [list(b) for b in blocks]
                # Tokens sampled but not yet returned are sampled again.
                known = self.scheduler.requests[request_id].num_tokens
                del row.tokens[known:]
                row.drafts = []
            elif blocks is not None:
                for mine, more in zip(row.blocks, blocks):
                    mine.extend(more)

        order = sorted(output.num_scheduled_tokens.items(), key=lambda x: x[1] > 1)
        sampled: dict[str, list[int]] = {}
        for request_id, count in order:
            row = self.rows[request_id]
            if self.asynchronous:
                # The scheduler took the drafts of the step before for accepted.
                computed[request_id] = min(computed[request_id], len(row.tokens) - 1)
            start = computed[request_id]
            drafts = self._scheduled_drafts(output, request_id)
            if drafts:
                del row.tokens[start + count - len(drafts) :]
                row.tokens += drafts
            else:
                assert start + count <= len(row.tokens)
            self._content(row, start + count)
        for group in range(len(self.specs)):
            self._layer(group, order, computed)
        for request_id, count in order:
            row = self.rows[request_id]
            drafts = self._scheduled_drafts(output, request_id)
            end = computed[request_id] + count
            if end < len(row.tokens):
                sampled[request_id] = []  # a chunk in the middle of a prompt
                continue
            verified = end - len(drafts)
            tokens = row.tokens[:verified]
            new: list[int] = []
            for draft in [*drafts, None]:
                new.append(next_token(tokens + new))
                if new[-1] != draft:
                    break
            row.tokens = tokens + new
            for ids in row.ids:
                del ids[verified + len(new) - 1 :]
            sampled[request_id] = new
            if self.num_drafts and self.asynchronous:
                row.drafts = self._drafts(row.tokens)
            self._draft_writes(row)
        ids = [request_id for request_id, _ in order]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=[sampled[r] for r in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _scheduled_drafts(self, output: SchedulerOutput, request_id: str) -> list[int]:
        """Asynchronously the scheduler gives placeholders for the worker's own."""
        drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
        if self.asynchronous:
            # A request that has none yet is padded; no token equals VOCAB.
            own = self.rows[request_id].drafts + [VOCAB] * len(drafts)
            drafts = own[: len(drafts)]
        return drafts

    def _draft_writes(self, row: Row) -> None:
        """A drafting model's K/V of tokens that may be rejected: junk, ahead."""
        first = len(row.tokens) - 1
        for group, spec in enumerate(self.specs):
            for position in range(first, first + self.config.num_lookahead_tokens):
                block = position // spec.block_size
                if position < self.config.model_config.max_model_len:
                    physical = row.blocks[group][block]
                    self.memory[physical, position % spec.block_size] = -3

    def _content(self, row: Row, length: int) -> None:
        """Content ids of all tokens: equal prefixes have equal ids."""
        for group, ids in enumerate(row.ids):
            for position in range(len(ids)):
                if position >= length:
                    break
            del ids[length:]
            valid = len(ids)
            # Re-derive from the first token that changed (drafts replaced).
            for position in range(max(0, valid - 16), length):
                previous = ids[position - 1] if position else group
                value = hash((group, previous, row.tokens[position])) & (2**62 - 1)
                if position < len(ids):
                    if ids[position] == value:
                        continue
                    del ids[position:]
                ids.append(value)

    def _layer(
        self, group: int, order: list[tuple[str, int]], computed: dict[str, int]
    ) -> None:
        if not order:
            return
        bs = self.specs[group].block_size
        memory = self.memory[:, :bs]
        rows = [self.rows[request_id] for request_id, _ in order]
        counts = np.array([count for _, count in order])
        start = np.array([computed[request_id] for request_id, _ in order])
        lens = start + counts
        width = -(-self.config.model_config.max_model_len // bs)
        table = torch.zeros(len(rows), width, dtype=torch.int32)
        for i, row in enumerate(rows):
            blocks = row.blocks[group]
            table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        bounds = np.concatenate(([0], np.cumsum(counts)))
        content = torch.tensor(
            [c for row, s, e in zip(rows, start, lens) for c in row.ids[group][s:e]]
        )
        positions = np.concatenate([np.arange(s, e) for s, e in zip(start, lens)])
        row_of = np.repeat(np.arange(len(rows)), counts)
        blocks = table[torch.from_numpy(row_of), torch.from_numpy(positions // bs)]
        slots = blocks.long() * bs + torch.from_numpy(positions % bs)
        common = CommonAttentionMetadata(
            query_start_loc=torch.from_numpy(bounds).int(),
            query_start_loc_cpu=torch.from_numpy(bounds).int(),
            seq_lens=torch.from_numpy(lens).int(),
            num_reqs=len(rows),
            num_actual_tokens=int(bounds[-1]),
            max_query_len=int(counts.max()),
            max_seq_len=int(lens.max()),
            block_table_tensor=table,
            slot_mapping=slots,
        )
        shape = self.shapes[group]
        if shape is None:
            memory[slots // bs, slots % bs] = content
            window = getattr(self.specs[group], "sliding_window", None)
            self._attend(memory, table, lens, counts, lens, rows, group, window)
            return
        groups = group_rows(bounds, lens, shape)
        for g in (g for g in groups if g.staged):
            view, copies, num_blocks = staged_view(common, g, lens, shape)
            staging = torch.full((num_blocks, bs), -2)
            staging[copies["copy_in_to"]] = memory[copies["copy_in_from"]]
            t = slice(bounds[g.first], bounds[g.last])
            put = view.slot_mapping
            staging[put // bs, put % bs] = content[t]
            self._attend_view(staging, view, g, lens, rows, group)
            memory[copies["copy_out_to"]] = staging[copies["copy_out_from"]]
        for g in (g for g in groups if not g.staged):
            buffers = ViewBuffers(len(lens), shape, torch.device("cpu"))
            view = in_place_view(common, g, shape, buffers)
            t = slice(bounds[g.first], bounds[g.last])
            put = view.slot_mapping
            memory[put // bs, put % bs] = content[t]
            self._attend_view(memory, view, g, lens, rows, group)

    def _attend_view(self, memory, view, g, lens, rows, group) -> None:
        counts = (view.query_start_loc[1:] - view.query_start_loc[:-1]).numpy()
        self._attend(
            memory,
            view.block_table_tensor,
            view.seq_lens.numpy(),
            counts,
            lens[g.first : g.last],
            rows[g.first : g.last],
            group,
            self.specs[group].sliding_window,  # the layer's, not the shape's
        )

    def _attend(self, memory, table, view_lens, counts, lens, rows, group, window):
        """Every key in the window of every query holds what it should."""
        bs = memory.shape[1]
        for r, row in enumerate(rows):
            first_query = int(view_lens[r]) - int(counts[r])
            low = 0 if window is None else max(0, first_query - window + 1)
            shift = int(lens[r]) - int(view_lens[r])
            assert int(view_lens[r]) <= table.shape[1] * bs, "the view is too narrow"
            if window is not None:  # the view begins where the window does, or before
                assert low + shift == max(0, int(lens[r]) - int(counts[r]) - window + 1)
            view = torch.arange(low, int(view_lens[r]))
            found = memory[table[r, view // bs].long(), view % bs]
            expected = torch.tensor(row.ids[group][low + shift : int(lens[r])])
            wrong = (found != expected).nonzero()
            assert not len(wrong), (
                f"group {group}: position {low + shift + int(wrong[0])} of a request "
                f"of {int(lens[r])} tokens is not what was written there"
            )
            self.reads += len(view)


def next_token(tokens: Sequence[int]) -> int:
    """A deterministic model: depends on the last tokens and the length."""
    return hash((*tokens[-3:], len(tokens))) % VOCAB
