# SPDX-License-Identifier: Apache-2.0
"""CPU time of vLLM's block allocation per decode step: ring against stock.

256 running requests past their windows, five sliding-window groups (W = 1024) and one
of full attention, block size 16, as for Gemma 3 27B: what ``allocate_slots`` and all it
calls cost per step, in microseconds per request. *full rings*: from W tokens after the
prompt on. *just after the prompt*: its last window is hashed, if prefix caching is on,
and is released block by block, in stock as on a ring. Two more rows give the floor:
vLLM's coordinator over sliding-window managers that do nothing, and a model without
such groups.

    python benchmarks/allocator.py
"""

import gc
import itertools
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from benchmarks.common import alternate, finish, parser, spread
from vllm_ringwindow.core.manager import RingBlockManager
from vllm_ringwindow.core.spec import RingParams, RingWindowSpec

WINDOW = 1024
BLOCK_SIZE = 16
SLIDING_GROUPS = 5
REQUESTS = 256
BARS = {False: 0.48, True: 0.58}  # ring / stock, by prefix caching


class IdleManager(RingBlockManager):
    """The floor: a group whose ring is full and that never looks at it."""

    def get_num_blocks_to_allocate(self, request_id, *args, **kwargs) -> int:
        return 0

    def allocate_new_blocks(self, request_id, *args, **kwargs) -> list:
        return []

    def remove_skipped_blocks(self, request_id, *args, **kwargs) -> None:
        pass

    def cache_blocks(self, request, *args, **kwargs) -> None:
        pass


class Allocator:
    """One manager with ``REQUESTS`` running requests, and a clock."""

    def __init__(self, kind: str, caching: bool, prompt: int, sliding_groups: int):
        common: dict[str, Any] = dict(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=128, dtype=torch.bfloat16
        )
        sliding = SlidingWindowSpec(sliding_window=WINDOW, **common)
        if kind != "stock":
            sliding = RingWindowSpec.from_sliding_window(
                sliding, RingParams(roll_back=0, prefix_caching=caching)
            )
        specs = [sliding] * sliding_groups + [FullAttentionSpec(**common)]
        groups = [KVCacheGroupSpec([f"layers.{i}"], s) for i, s in enumerate(specs)]
        per_request = (prompt + 4096) // BLOCK_SIZE * (sliding_groups + 1)
        config = KVCacheConfig(
            num_blocks=REQUESTS * per_request,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=0,
        )
        hash_fn = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(hash_fn)
        hasher = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, hash_fn)
        self.kv = KVCacheManager(
            config,
            max_model_len=1 << 17,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            max_in_flight_tokens=2 * 8192,
            enable_caching=caching,
        )
        self.requests = []
        for i in range(REQUESTS):
            # Not all cross a block border in the same step.
            tokens = list(itertools.islice(itertools.cycle(range(i, i + 97)), prompt))
            request = Request(
                request_id=str(i),
                prompt_token_ids=tokens[: prompt - i % BLOCK_SIZE],
                sampling_params=SamplingParams(max_tokens=4096),
                pooling_params=None,
                block_hasher=hasher if caching else None,
            )
            self.kv.new_step_starts()
            computed, num_computed, *_ = self.kv.get_computed_blocks(request)
            assert self.kv.allocate_slots(
                request, request.num_tokens - num_computed, num_computed, computed
            )
            request.num_computed_tokens = request.num_tokens
            self.requests.append(request)

    def steps(self, count: int) -> float:
        """Decode ``count`` steps; microseconds per request and step in the manager."""
        spent = 0.0
        for _ in range(count):
            for request in self.requests:
                request.append_output_token_ids(7)
            gc.disable()
            start = time.process_time()
            self.kv.new_step_starts()
            for request in self.requests:
                self.kv.allocate_slots(request, 1)
            spent += time.process_time() - start
            gc.enable()
            for request in self.requests:
                request.num_computed_tokens += 1
        return spent / count / len(self.requests) * 1e6


def measure(caching: bool, rounds: int, steps: int, prompt: int) -> list[dict]:
    """Rows for one setting of prefix caching."""
    ring_manager = KVCacheSpecRegistry.get_manager_class(
        RingWindowSpec(
            block_size=16,
            num_kv_heads=1,
            head_size=1,
            dtype=torch.float32,
            sliding_window=1,
        )
    )
    assert ring_manager is RingBlockManager
    allocators = {}
    for name, kind, groups in (
        ("stock", "stock", SLIDING_GROUPS),
        ("ring", "ring", SLIDING_GROUPS),
        ("idle managers", "idle", SLIDING_GROUPS),
        ("no sliding groups", "stock", 0),
    ):
        allocators[name] = Allocator(kind, caching, prompt, groups)
        if kind == "idle":
            coordinator = allocators[name].kv.coordinator
            coordinator.__class__ = coordinator.__class__.__mro__[2]
            for manager in coordinator.single_type_managers:
                if isinstance(manager, RingBlockManager):
                    manager.__class__ = IdleManager
    runs = {name: (lambda a=a: a.steps(steps)) for name, a in allocators.items()}
    rows = []
    for phase, warm_up in (("just after the prompt", 16), ("full rings", WINDOW)):
        for allocator in allocators.values():
            allocator.steps(warm_up)
        measured = alternate(runs, rounds)
        stock = spread(measured["stock"])["median"]
        for name, values in measured.items():
            found = spread(values)
            row = {
                "caching": "on" if caching else "off",
                "phase": phase,
                "managers": name,
                "us per request": found["median"],
                "min": found["min"],
                "max": found["max"],
                "ratio to stock": found["median"] / stock,
            }
            if (name, phase) == ("ring", "full rings"):
                row["bar"] = BARS[caching]
            rows.append(row)
    return rows


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--steps", type=int, default=64, help="decode steps a round")
    arguments.add_argument("--prompt", type=int, default=2048, help="tokens")
    arguments.add_argument("--check", action="store_true", help="exit 1 below the bars")
    args = arguments.parse_args()
    if args.quick:
        args.rounds, args.steps = 5, 32
    from vllm_ringwindow import register

    register()
    rows = []
    for caching in BARS:
        rows += measure(caching, args.rounds, args.steps, args.prompt)
    missed = any(row["ratio to stock"] > row["bar"] for row in rows if "bar" in row)
    finish(args, "allocator", rows, model="shapes")
    return int(missed and args.check)


if __name__ == "__main__":
    sys.exit(main())
