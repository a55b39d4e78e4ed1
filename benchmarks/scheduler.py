# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler at the shape of a real model, without the model.

The planner, the asynchronous scheduler and the block managers are the real ones; the
worker is a stub that makes tokens up, with two batches in flight. Stock and ring serve
the same synthetic trace from the same KV bytes. Time is counted in steps: an arrival,
a wait or a pause is so many calls of ``schedule``, whatever a step would take.

``long-prompt``: Poisson arrivals, log-normal prompts of 6k to 24k tokens, one of four
heads of 1024 tokens in common, 200 to 600 new tokens.
``chat``: sessions whose turns share their history; a turn follows when the one before
is answered.

Each is served with *limited* KV memory (stock is short of it), with *ample* memory, and
long-prompt with the *same batch* for both (``max_num_seqs`` is what stock ran in the
mean) and with more and less memory. ``running`` is the mean number of running requests
over all steps, ``wait`` the mean steps from arrival to the first token computed,
``preempted`` preemptions per finished request, ``hits`` prompt tokens found in the
prefix cache, ``CPU ms`` the scheduler's CPU time per step (median).
"""

if __name__ == "__main__" and not __package__:  # python benchmarks/scheduler.py
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).parent.parent)

import argparse
import heapq
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks import common
from benchmarks.shapes import GIB, SHAPES, engine_config, layer_specs, plan

# KV memory in GiB: about what an 80 GB device has beside Gemma 3 27B's bfloat16
# weights, and a 16 GB one beside gpt-oss 20B's.
KV_GIB = {"gemma3-27b": 16.0, "gpt-oss-20b": 2.0}
AMPLE = 32  # times as much: nothing is preempted or evicted
MAX_MODEL_LEN = 32768  # tokens
VOCAB = 1 << 17
MODES = ("stock", "ring")
RUNNING_BAR = 1.4  # mean running requests on long-prompt, ring/stock


class Turn(NamedTuple):
    """One request."""

    pause: int  # steps since the turn before was answered, or since the start
    prompt: list[int]
    answer: list[int]  # what the stub samples


Trace = Sequence[Sequence[Turn]]  # sessions


def _lognormal(rng: random.Random, median: float, least: int, most: int) -> int:
    value = median * rng.lognormvariate(0, 0.4)
    return int(min(max(value, least), most))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def long_prompt(num_requests: int, steps_between: float, seed: int = 0) -> Trace:
    """Sessions of one turn, ``steps_between`` arrivals in the mean."""
    rng = random.Random(seed)
    heads = [_tokens(rng, 1024) for _ in range(4)]
    at = 0.0
    trace = []
    for _ in range(num_requests):
        at += rng.expovariate(1 / steps_between)
        prompt = rng.choice(heads) + _tokens(
            rng, _lognormal(rng, 11_000, 6_000, 24_000) - 1024
        )
        trace.append([Turn(int(at), prompt, _tokens(rng, rng.randint(200, 600)))])
    return trace


def chat(num_sessions: int, steps_between: float, seed: int = 0) -> Trace:
    """Sessions of 3 to 6 turns; the first brings a text along."""
    rng = random.Random(seed)
    system = _tokens(rng, 600)
    at = 0.0
    trace = []
    for _ in range(num_sessions):
        at += rng.expovariate(1 / steps_between)
        turns = []
        pause = int(at)
        history = system + _tokens(rng, _lognormal(rng, 4_000, 1_000, 12_000))
        for _ in range(rng.randint(3, 6)):
            history = history + _tokens(rng, _lognormal(rng, 300, 50, 2_000))
            turns.append(Turn(pause, history, _tokens(rng, rng.randint(100, 300))))
            history = history + turns[-1].answer
            pause = rng.randint(20, 300)
        trace.append(turns)
    return trace


class Stub:
    """Samples a request's answer token by token once its prompt is computed."""

    def __init__(self, scheduler: AsyncScheduler) -> None:
        self.scheduler = scheduler
        self.turns: dict[str, Turn] = {}
        self.lengths: dict[str, int] = {}  # tokens known to the worker

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        computed = {}
        for new in output.scheduled_new_reqs:
            self.lengths[new.req_id] = len(self.turns[new.req_id].prompt)
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, done in zip(cached.req_ids, cached.num_computed_tokens):
            computed[request_id] = done
            if request_id in cached.resumed_req_ids:
                # What was sampled but not yet returned is sampled again.
                known = self.scheduler.requests[request_id].num_tokens
                self.lengths[request_id] = known
        ids = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for request_id in ids:
            length = self.lengths[request_id]
            end = computed[request_id] + output.num_scheduled_tokens[request_id]
            if end < length:  # a chunk in the middle of a prompt
                sampled.append([])
                continue
            turn = self.turns[request_id]
            sampled.append([turn.answer[length - len(turn.prompt)]])
            self.lengths[request_id] += 1
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )


class Served(NamedTuple):
    """One run of a trace. All but ``cpu`` repeats exactly."""

    finished: int  # requests
    steps: int  # with tokens scheduled
    running: float  # requests, mean over the steps
    wait: float  # steps from arrival to the first token computed, mean
    preemptions: int
    hits: int  # prompt tokens found in the prefix cache at first admission
    cpu: float  # seconds in schedule and update_from_output, per step


def make_scheduler(config: VllmConfig, kv_config: KVCacheConfig) -> AsyncScheduler:
    config.cache_config.num_gpu_blocks = kv_config.num_blocks
    sizes = kv_cache_utils.resolve_kv_cache_block_sizes(kv_config, config)
    return AsyncScheduler(
        vllm_config=config,
        kv_cache_config=kv_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=sizes[0],
        hash_block_size=sizes[1],
        log_stats=False,
    )


def serve(config: VllmConfig, kv_config: KVCacheConfig, trace: Trace) -> Served:
    """Run a trace to its end.

    Raises:
        RuntimeError: a request starves.
    """
    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    kv_cache_utils.init_none_hash(hash_fn)
    scheduler = make_scheduler(config, kv_config)
    hasher = kv_cache_utils.get_request_block_hasher(scheduler.hash_block_size, hash_fn)
    stub = Stub(scheduler)
    # (step, session, turn)
    arrivals = [(turns[0].pause, i, 0) for i, turns in enumerate(trace)]
    heapq.heapify(arrivals)
    arrived: dict[str, int] = {}
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
    now = steps = running = preemptions = hits = finished = idle = 0
    waits: list[int] = []
    cpu = 0.0

    while arrivals or in_flight or scheduler.has_requests():
        if arrivals and not in_flight and not scheduler.has_requests():
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            at, session, number = heapq.heappop(arrivals)
            turn = trace[session][number]
            request_id = f"{session}.{number}"
            stub.turns[request_id], arrived[request_id] = turn, at
            scheduler.add_request(
                Request(
                    request_id=request_id,
                    prompt_token_ids=turn.prompt,
                    sampling_params=SamplingParams(
                        temperature=0, max_tokens=len(turn.answer), ignore_eos=True
                    ),
                    pooling_params=None,
                    block_hasher=hasher,
                )
            )
        started = time.process_time()
        output = scheduler.schedule()
        cpu += time.process_time() - started
        preemptions += len(output.preempted_req_ids or ())
        waits += [now - arrived[new.req_id] for new in output.scheduled_new_reqs]
        hits += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        scheduled = output.total_num_scheduled_tokens > 0
        if scheduled:
            steps += 1
            running += len(scheduler.running)
            in_flight.append((output, stub.execute(output)))
        idle = 0 if scheduled or in_flight else idle + 1
        if idle > 100:
            raise RuntimeError(f"nothing was scheduled for {idle} steps")
        now += 1
        if in_flight and (len(in_flight) == 2 or not scheduled):
            done = in_flight.popleft()
            started = time.process_time()
            outputs = scheduler.update_from_output(*done)
            cpu += time.process_time() - started
            for out in (o for os in outputs.values() for o in os.outputs):
                if out.finish_reason is None:
                    continue
                finished += 1
                session, number = map(int, out.request_id.split("."))
                if number + 1 < len(trace[session]):
                    at = now + trace[session][number + 1].pause
                    heapq.heappush(arrivals, (at, session, number + 1))
    if finished != sum(map(len, trace)):
        raise RuntimeError(f"{finished} requests of {sum(map(len, trace))} finished")
    return Served(
        finished=finished,
        steps=steps,
        running=running / steps,
        wait=sum(waits) / len(waits),
        preemptions=preemptions,
        hits=hits,
        cpu=cpu / steps,
    )


class Setting(NamedTuple):
    """What a trace is served with."""

    name: str
    kv_bytes: int
    max_num_seqs: int
    rounds: int


def compare(key: str, trace: Trace, setting: Setting) -> dict[str, list[Served]]:
    """Each mode's runs, in the order A B A B.

    Raises:
        RuntimeError: a mode does not start with so little memory, or two runs of it
            differ in more than CPU time.
    """
    # The stub needs no attention backend: only the specs differ between the modes.
    config = engine_config(
        SHAPES[key], max_model_len=MAX_MODEL_LEN, max_num_seqs=setting.max_num_seqs
    )
    runs: dict[str, list[Served]] = {mode: [] for mode in MODES}

    def run(mode: str) -> float:
        specs = layer_specs(SHAPES[key], config, ring=mode == "ring")
        planned = plan(config, specs, setting.kv_bytes)
        if planned is None:
            gib = setting.kv_bytes / GIB
            raise RuntimeError(f"{key}: {mode} does not start with {gib:g} GiB")
        runs[mode].append(serve(config, planned, trace))
        return runs[mode][-1].cpu

    common.alternate({mode: partial(run, mode) for mode in MODES}, setting.rounds)
    for mode, served in runs.items():
        if len({run._replace(cpu=0.0) for run in served}) > 1:
            raise RuntimeError(f"{mode}: runs differ: {served}")
    return runs


def rows_of(
    key: str, trace_name: str, trace: Trace, setting: Setting
) -> list[dict[str, Any]]:
    """One row per mode, stock first."""
    rows: list[dict[str, Any]] = []
    for mode, runs in compare(key, trace, setting).items():
        run = runs[0]
        cpu = common.spread([r.cpu * 1e3 for r in runs])
        row = {
            "model": key,
            "trace": trace_name,
            "setting": setting.name,
            "KV GiB": setting.kv_bytes / GIB,
            "mode": mode,
            "requests": run.finished,
            "steps": run.steps,
            "running": run.running,
            "wait": run.wait,
            "preempted": run.preemptions / run.finished,
            "hits": run.hits,
            "CPU ms": cpu["median"],
            "CPU min": cpu["min"],
            "CPU max": cpu["max"],
        }
        if rows:
            row["running ring/stock"] = run.running / rows[0]["running"]
        rows.append(row)
    return rows


def verdicts(
    stock: dict[str, Any], ring: dict[str, Any]
) -> list[tuple[str, bool | None]]:
    """What was found and whether it met its bar; None where there is no bar."""
    about = f"{stock['model']} {stock['trace']}, {stock['setting']}"
    hits = f"{about}: prefix hits ring {ring['hits']:,}, stock {stock['hits']:,} tokens"
    if stock["setting"] == "ample":
        return [(f"{hits}, bar: equal", ring["hits"] == stock["hits"])]
    if stock["setting"] == "same batch":
        return [(f"{hits}, bar: not fewer", ring["hits"] >= stock["hits"])]
    if stock["setting"] != "limited":
        return []
    ratio = ring["running ring/stock"]
    running = f"{about}: running requests ring/stock {ratio:.2f}"
    barred = stock["trace"] == "long-prompt"
    return [
        (f"{running}, bar {RUNNING_BAR}", ratio >= RUNNING_BAR)
        if barred
        else (running, None),
        (
            f"{about}: preempted per request ring {ring['preempted']:.3f}, stock "
            f"{stock['preempted']:.3f}, bar: not more",
            ring["preempted"] <= stock["preempted"],
        ),
        # More requests at once leave less of the pool to what is only cached.
        (f"{hits} (compared where memory is ample)", None),
    ]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of every trace and setting."""
    kv_bytes = int((args.kv_gib or KV_GIB[args.model]) * GIB)
    rounds = args.rounds or (1 if args.quick else 3)
    traces = {
        "long-prompt": long_prompt(120, steps_between=20, seed=args.seed),
        "chat": chat(40, steps_between=8, seed=args.seed),
    }
    rows: list[dict[str, Any]] = []
    for name, trace in traces.items():
        limited = rows_of(
            args.model, name, trace, Setting("limited", kv_bytes, 256, rounds)
        )
        rows += limited
        settings = [Setting("ample", AMPLE * kv_bytes, 256, rounds)]
        if name == "long-prompt":
            batch = int(limited[0]["running"])
            settings.append(Setting("same batch", kv_bytes, batch, 1))
            if not args.quick:
                settings += [
                    Setting(f"{times:g} times", int(times * kv_bytes), 256, 1)
                    for times in (0.75, 1.5, 2)
                ]
        for setting in settings:
            rows += rows_of(args.model, name, trace, setting)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("vLLM's scheduler on synthetic traces, stock and ring")
    parser.add_argument("--model", choices=KV_GIB, default="gemma3-27b")
    parser.add_argument("--kv-gib", type=float, help="KV memory in GiB")
    parser.add_argument("--rounds", type=int, help="runs of each mode, for CPU time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rows = measure(args)
    common.finish(args, "scheduler", rows, model=args.model)
    failed = 0
    for stock, ring in zip(rows[::2], rows[1::2]):
        for line, met in verdicts(stock, ring):
            verdict = {None: "", True: ": ok", False: ": MISSED"}[met]
            print(line + verdict, file=sys.stderr)
            failed |= met is False
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
