# SPDX-License-Identifier: Apache-2.0
"""Several workers or engines: tensor, data and pipeline parallelism, and Ray.

vLLM 0.32's CPU build starts neither pipelines nor Ray's executor, with or without
rings: the planner, the scheduler (``test_simulated_scheduler``, "2 ranks") and Ray's
pickling stand in for them.
"""

import pytest
import ray
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheSpec

from tests.harness import (
    DEFAULTS,
    RING,
    STOCK,
    assert_same,
    complete,
    random_prompts,
    run,
    run_spawned,
    server,
)
from tests.simulator import make_config, make_specs
from vllm_ringwindow.compat import plan_kv_cache
from vllm_ringwindow.core.spec import RingWindowSpec
from vllm_ringwindow.report import decision

W = 64


@pytest.fixture(scope="module")
def gemma(models):
    return models("gemma3", W)


@pytest.fixture
def one_core_each(monkeypatch):
    """On one NUMA node the CPU build wants to be told."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.feature("tensor parallel", "works")
def test_two_tensor_parallel_workers(gemma, one_core_each):
    """Spawned workers, half the heads each."""
    prompts = random_prompts([10, 3 * W, 6 * W])
    expected = run(gemma, STOCK, prompts, 24)
    options = DEFAULTS | dict(tensor_parallel_size=2, max_num_batched_tokens=100)
    assert_same(expected, run_spawned(gemma, RING, prompts, 24, **options))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.feature("data parallel", "works")
def test_two_data_parallel_engines(gemma, one_core_each, tmp_path):
    """Behind one ``vllm serve``; asked for sliding-window layers by kind."""
    prompts = random_prompts([10, 3 * W, 6 * W, 200])
    expected = run(gemma, STOCK, prompts, 24)
    options = [
        "--dtype=float32",
        "--enforce-eager",
        "--max-model-len=2048",
        "--block-size=32",
        "--kv-cache-memory-bytes=268435456",
        "--skip-tokenizer-init",
        "--data-parallel-size=2",
        '--attention-config={"backend_per_kind": {"sliding_window": "ring"}}',
    ]
    with server(gemma, *options, log=tmp_path / "log") as url:
        for prompt, output in zip(prompts, expected, strict=True):
            answer = complete(
                url,
                model=str(gemma),
                prompt=prompt,
                return_token_ids=True,
                ignore_eos=True,
                logprobs=None,
            )
            assert tuple(answer["token_ids"]) == output.tokens
    said = (tmp_path / "log").read_text()
    for rank in ("EngineCore_DP0", "EngineCore_DP1"):
        assert any(
            rank in line and "ring: on rings: 5 layers" in line
            for line in said.splitlines()
        )


@pytest.mark.feature("pipeline parallel", "works (planner)")
@pytest.mark.parametrize(
    "first, second", [("S", "SSSSSF"), ("SSSSSF", "S"), ("F", "SS")]
)
def test_case_24_ranks_with_unequal_layer_mixes_agree(gemma, first, second):
    """Every rank gets the same groups, block counts and block sizes; stock's groups."""
    config = make_config(gemma, block_size=32)
    config.parallel_config.pipeline_parallel_size = 2
    config.cache_config.kv_cache_layout = "LBHNC"
    windows = [None if kind == "F" else W for kind in first + second]

    def plan_ranks(ring):
        specs = make_specs(config, windows, 32, ring=ring)
        names = list(specs)
        parts = names[: len(first)], names[len(first) :]
        ranks = [{name: specs[name] for name in part} for part in parts]
        memory = [1 << 24, 1 << 26]
        return specs, plan_kv_cache(config, ranks, memory)

    specs, plans = plan_ranks(ring=True)
    _, stock_plans = plan_ranks(ring=False)
    one, two = plans
    assert one.num_blocks == two.num_blocks
    assert len(one.kv_cache_groups) == len(two.kv_cache_groups)
    for a, b in zip(one.kv_cache_groups, two.kv_cache_groups):
        assert a.kv_cache_spec.block_size == b.kv_cache_spec.block_size
        assert type(a.kv_cache_spec) is type(b.kv_cache_spec)
    for plan, stock in zip(plans, stock_plans):
        assert [g.layer_names for g in plan.kv_cache_groups] == [
            g.layer_names for g in stock.kv_cache_groups
        ]
    (ring,) = {s for s in specs.values() if isinstance(s, RingWindowSpec)}
    assert ring.num_ring_blocks == 3
    for plan in plans:  # each rank reports without failing
        assert decision(config, plan)


def spec_and_backend(config: VllmConfig, spec: KVCacheSpec):
    """Runs in a Ray worker, which has unpickled both."""
    from vllm_ringwindow import policy

    return policy.ring_requested(config), spec.num_ring_blocks, type(spec).__name__


@pytest.fixture(scope="module")
def ray_cluster():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.feature("Ray executor", "works (pickling)")
def test_configs_and_specs_survive_rays_pickling(gemma, ray_cluster):
    """A config that names the backend reaches a process without plugins (H1)."""
    config = make_config(gemma, block_size=32)
    (spec,) = make_specs(config, [W], 32).values()
    assert spec.num_ring_blocks == 3
    remote = ray.remote(spec_and_backend)
    asked = ray.get(remote.remote(config, spec))
    assert asked == (True, 3, "RingWindowSpec")
