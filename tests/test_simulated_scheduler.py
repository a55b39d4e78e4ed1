# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler over a checking worker: what no CPU engine can run, and properties.

The worker asserts at every step that each query finds the right content in its window
(see ``simulator``), so a test that only runs to the end has checked every read.
"""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool

from tests.simulator import (
    VOCAB,
    Simulator,
    make_config,
    make_specs,
    plan,
    smallest_pool,
)
from vllm_ringwindow.attention.metadata import staged_view
from vllm_ringwindow.core.manager import RingBlockManager
from vllm_ringwindow.core.spec import RingParams, RingWindowSpec

BS = 4


@pytest.fixture(scope="module")
def model(models):
    return models("gemma3", 64)


def simulate(model, *, windows, spare_blocks=200, ring=True, block_size=BS, **options):
    """A simulator over the smallest pool that starts plus ``spare_blocks``."""
    names = ("num_drafts", "seed", "depth")
    sim_options = {k: options.pop(k) for k in names if k in options}
    block_sizes = options.pop("block_sizes", None)
    config = make_config(model, block_size=block_size, **options)
    # vLLM's CPU build does not start pipelines; the scheduler has no such limit.
    config.parallel_config.pipeline_parallel_size = sim_options.get("depth") or 1
    specs = make_specs(config, windows, block_size, ring=ring, block_sizes=block_sizes)
    num_blocks = smallest_pool(config, specs) + spare_blocks
    return Simulator(config, plan(config, specs, num_blocks), **sim_options)


def prompts(rng, lengths):
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


workload = st.fixed_dictionaries(
    dict(
        window=st.integers(1, 24),
        layers=st.sampled_from(["S", "SF", "SSF", "ST F".replace(" ", "")]),
        budget=st.integers(3, 60),
        caching=st.booleans(),
        retention=st.sampled_from([0, None, 8]),
        asynchronous=st.booleans(),
        spare_blocks=st.integers(0, 120),
        lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6),
        shared=st.integers(0, 60),
        max_tokens=st.integers(1, 40),
        gap=st.integers(0, 4),
        seed=st.integers(0, 2**16),
    )
)


def layer_windows(layers, window):
    return [{"S": window, "T": 2 * window + 3, "F": None}[c] for c in layers]


@settings(max_examples=120, deadline=None)
@given(case=workload)
def test_every_query_reads_what_was_written(model, case):
    """Chunks of any size, mixed steps, sharing, preemption, async: I2 to I9."""
    rng = random.Random(case["seed"])
    sim = simulate(
        model,
        windows=layer_windows(case["layers"], case["window"]),
        spare_blocks=case["spare_blocks"],
        max_num_batched_tokens=case["budget"],
        max_num_seqs=min(8, case["budget"]),
        max_model_len=192,
        enable_prefix_caching=case["caching"],
        prefix_cache_retention_interval=case["retention"],
        asynchronous=case["asynchronous"],
    )
    head = prompts(rng, [case["shared"]])[0]
    arrivals = [
        (i * case["gap"], head + tail, case["max_tokens"])
        for i, tail in enumerate(prompts(rng, case["lengths"]))
    ]
    outputs = sim.run(arrivals)
    assert all(len(tokens) == case["max_tokens"] for tokens in outputs)
    assert sim.pool.get_num_free_blocks() == sim.num_free_at_start
    assert sim.reads > 0


def drafting(model, num_drafts, by_model):
    if by_model:
        options = {"method": "draft_model", "model": str(model)}
    else:
        options = {"method": "ngram", "prompt_lookup_max": 2}
    return options | {"num_speculative_tokens": num_drafts}


@pytest.mark.feature(
    "drafts with asynchronous scheduling or pipelines", "works (scheduler)"
)
@settings(max_examples=120, deadline=None)
@given(
    window=st.integers(1, 20),
    drafts=st.integers(1, 5),
    budget=st.integers(8, 40),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
    caching=st.booleans(),
    in_flight=st.sampled_from(["one step", "asynchronous", "2 ranks", "3 ranks"]),
    model_drafts=st.booleans(),
)
def test_rejected_drafts_never_cost_a_window(
    model, window, drafts, budget, lengths, seed, caching, in_flight, model_drafts
):
    """With drafts of several batches in flight, and a drafter that writes ahead."""
    sim = simulate(
        model,
        windows=[window, None],
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        max_model_len=192,
        enable_prefix_caching=caching,
        asynchronous=in_flight == "asynchronous",
        depth={"asynchronous": 0, "2 ranks": 2, "3 ranks": 3}.get(in_flight, 1),
        speculative_config=drafting(model, drafts, model_drafts),
        num_drafts=drafts,
        seed=seed,
    )
    sim.run([(0, p, 40) for p in prompts(random.Random(seed), lengths)])
    assert sim.pool.get_num_free_blocks() == sim.num_free_at_start
    assert any(s.scheduled_spec_decode_tokens for s in sim.steps)


@settings(max_examples=60, deadline=None)
@given(
    window=st.integers(1, 24),
    layers=st.sampled_from(["S", "SF", "STF"]),
    mixed_blocks=st.booleans(),
    budget=st.integers(8, 80),
    retention=st.sampled_from([0, None, 8, 16]),
    asynchronous=st.booleans(),
    turns=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 70), st.integers(1, 20)),
        min_size=2,
        max_size=7,
    ),
    seed=st.integers(0, 2**16),
)
def test_prefix_reuse_equals_stock(
    model, window, layers, mixed_blocks, budget, retention, asynchronous, turns, seed
):
    """Chats that continue or fork earlier prompts, one at a time, an ample pool (I9).

    ``turns``: (how to start, new tokens, tokens to generate); start 0 = the system
    prompt, 1 = the last conversation, 2 = the last prompt without its answer.
    """
    windows = layer_windows(layers, window)
    mixed_blocks = mixed_blocks and None in windows
    sizes = [8 if w is None else 4 for w in windows] if mixed_blocks else None
    cached = []
    for ring in (False, True):
        rng = random.Random(seed)
        system = prompts(rng, [30])[0]
        last_prompt = last_talk = system
        sim = simulate(
            model,
            windows=windows,
            ring=ring,
            spare_blocks=3000,
            block_sizes=sizes,
            block_size=8 if mixed_blocks else BS,
            max_num_batched_tokens=budget,
            max_num_seqs=8,
            max_model_len=1024,
            enable_prefix_caching=True,
            prefix_cache_retention_interval=retention,
            asynchronous=asynchronous,
        )
        for start, new, answer in turns:
            prompt = (system, last_talk, last_prompt)[start] + prompts(rng, [new])[0]
            (tokens,) = sim.run([(0, prompt, answer)])[-1:]
            last_prompt, last_talk = prompt, prompt + tokens
        cached.append(
            [n.num_computed_tokens for s in sim.steps for n in s.scheduled_new_reqs]
        )
    assert cached[0] == cached[1]


@pytest.mark.feature("streaming input", "works (scheduler)")
@settings(max_examples=60, deadline=None)
@given(
    window=st.integers(1, 24),
    budget=st.integers(8, 60),
    caching=st.booleans(),
    turns=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=2, max_size=5
    ),
    seed=st.integers(0, 2**16),
)
def test_streaming_input_finds_its_context(model, window, budget, caching, turns, seed):
    """A session's next input enters the batch with its whole block list: lent ones too.

    Beside it a plain request keeps the pool and the batch busy.
    """
    rng = random.Random(seed)
    sim = simulate(
        model,
        windows=[window, None],
        spare_blocks=40,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        max_model_len=640,
        enable_prefix_caching=caching,
    )
    session = None
    for new, answer in turns:
        (prompt,) = prompts(rng, [new])
        session = sim.add(prompt, answer, session=session, resumable=True)
    sim.add([], 1, session=session)  # the end of the session
    sim.run([(0, prompts(rng, [90])[0], 60)])
    assert len(sim.outputs[session]) == sum(answer for _, answer in turns)
    assert sim.pool.get_num_free_blocks() == sim.num_free_at_start


def test_without_lending_a_streaming_session_loses_its_context(model, monkeypatch):
    allocate = RingBlockManager.allocate_new_blocks

    def forgetful(self, request_id, *args, **kwargs):
        new_blocks = allocate(self, request_id, *args, **kwargs)
        for i in self._rings[request_id].lent:
            self.req_to_blocks[request_id][i] = self._null_block
        self._rings[request_id].lent = []
        return new_blocks

    def run():
        sim = simulate(model, windows=[10, None], enable_prefix_caching=False)
        (first, second) = prompts(random.Random(0), [50, 60])
        session = sim.add(first, 5, resumable=True)
        sim.add(second, 5, session=session, resumable=True)
        sim.add([], 1, session=session)
        sim.run([])

    run()
    monkeypatch.setattr(RingBlockManager, "allocate_new_blocks", forgetful)
    with pytest.raises(AssertionError):
        run()


# -- what the checking worker notices: break one thing at a time -----------------------


def busy(model, **options):
    """Chunks, wraps, shared prefixes in one step, a pool that preempts."""
    rng = random.Random(7)
    values = dict(
        windows=[10, None],
        spare_blocks=20,
        max_num_batched_tokens=48,
        max_model_len=192,
        enable_prefix_caching=True,
    )
    sim = simulate(model, **(values | options))
    head = prompts(rng, [21])[0]
    tails = prompts(rng, [0, 0, 5, 60, 90, 90, 33, 1])
    sim.run([(i // 3, head + tail, 40) for i, tail in enumerate(tails)])
    return sim


def test_lent_blocks_are_not_hashed_when_the_pool_is_tight(model, monkeypatch):
    """Retained blocks without a block of their own stay out of the prefix cache."""

    def run():
        for spare_blocks in range(6):
            sim = simulate(
                model,
                windows=[8],
                spare_blocks=spare_blocks,
                max_num_batched_tokens=26,
                max_model_len=192,
                enable_prefix_caching=True,
                prefix_cache_retention_interval=16,
            )
            other, long = prompts(random.Random(0), [2, 51])
            sim.run([(0, other, 20), (1, long, 2)])

    run()
    monkeypatch.setattr(RingBlockManager, "_lent_blocks", lambda *_: {})
    with pytest.raises(AssertionError, match="hashed as what it does not hold"):
        run()


def test_the_busy_workload_is_busy(model):
    sim = busy(model)
    assert sum(len(s.preempted_req_ids or ()) for s in sim.steps) >= 2
    assert any(n.num_computed_tokens for s in sim.steps for n in s.scheduled_new_reqs)
    assert sim.reads > 1000


def one_ring_block_short(monkeypatch):
    size = RingWindowSpec.num_ring_blocks.fget
    monkeypatch.setattr(
        RingWindowSpec, "num_ring_blocks", property(lambda self: size(self) - 1)
    )


def same_step_hits_do_not_wait(monkeypatch):
    cache_blocks = RingBlockManager.cache_blocks

    def forgetful(self, *args, **kwargs):
        cache_blocks(self, *args, **kwargs)
        self._published.clear()

    monkeypatch.setattr(RingBlockManager, "cache_blocks", forgetful)


def context_is_released_a_block_early(monkeypatch):
    skipped = RingBlockManager.get_num_skipped_tokens
    monkeypatch.setattr(
        RingBlockManager,
        "get_num_skipped_tokens",
        lambda self, n: skipped(self, n) + self.block_size if n else 0,
    )


def shared_blocks_are_recycled(monkeypatch):
    monkeypatch.setattr(
        BlockPool, "is_block_writable", lambda self, block: not block.is_null
    )


def copy_out_in_the_wrong_order(monkeypatch):
    def broken(*args):
        view, copies, num_blocks = staged_view(*args)
        copies["copy_out_to"] = copies["copy_out_to"].flip(0)
        return view, copies, num_blocks

    monkeypatch.setattr("tests.simulator.staged_view", broken)


def copy_in_forgets_the_oldest_block(monkeypatch):
    def broken(*args):
        view, copies, num_blocks = staged_view(*args)
        for name in ("copy_in_from", "copy_in_to"):
            copies[name] = copies[name][1:]
        return view, copies, num_blocks

    monkeypatch.setattr("tests.simulator.staged_view", broken)


def retained_blocks_get_no_content(monkeypatch):
    def broken(*args):
        view, copies, num_blocks = staged_view(*args)
        for name in ("copy_out_from", "copy_out_to"):
            copies[name] = copies[name][-1:]
        return view, copies, num_blocks

    monkeypatch.setattr("tests.simulator.staged_view", broken)


def window_one_short(monkeypatch):
    shape = Simulator._shape

    def broken(self, spec):
        made = shape(self, spec)
        return made and replace(made, window=made.window - 1)

    monkeypatch.setattr(Simulator, "_shape", broken)


@pytest.mark.parametrize(
    "fault",
    [
        one_ring_block_short,
        same_step_hits_do_not_wait,
        context_is_released_a_block_early,
        shared_blocks_are_recycled,
        copy_out_in_the_wrong_order,
        copy_in_forgets_the_oldest_block,
        retained_blocks_get_no_content,
        window_one_short,
    ],
)
def test_the_worker_notices(model, monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        busy(model)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("model_drafts", [False, True])
def test_slack_for_rejected_drafts_is_needed(
    model, monkeypatch, in_flight, model_drafts
):
    """k=3 drafts: a ring with less than k tokens of slack loses a window.

    The drafts of other batches in flight cost a worker nothing: a recycled block keeps
    its content until a token is written, and its row still names it. The scheduler's
    list does not, so a session that re-enters with its list needs theirs as well.
    """

    def run():
        for window in range(2 * BS, 3 * BS):
            sim = simulate(
                model,
                windows=[window, None],
                enable_prefix_caching=False,
                asynchronous=in_flight == 2,
                speculative_config=drafting(model, 3, model_drafts),
                num_drafts=3,
            )
            sim.run([(0, p, 60) for p in prompts(random.Random(0), [1, 9, 30])])

    run()
    from_config = RingParams.from_config

    def one_short(config):
        params = from_config(config)
        return params._replace(roll_back=3 - 1 + params.lookahead)

    monkeypatch.setattr(RingParams, "from_config", one_short)
    with pytest.raises(AssertionError):
        run()
