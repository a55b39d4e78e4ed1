# SPDX-License-Identifier: Apache-2.0
"""KV connectors: sliding-window layers pass through to stock, and the log says so.

A connector reads blocks behind the scheduler's back, after the ring may have
overwritten them. Those that vLLM's CPU build runs are tested with an engine, the others
by the decision alone.
"""

import pytest
from vllm.config import KVTransferConfig

from tests.harness import RING, STOCK, assert_same, engine, random_prompts, run
from tests.simulator import make_config
from tests.test_plugin import Said
from vllm_ringwindow.policy import check_supported, pass_through_reason

W = 64
CONNECTORS = [
    "SimpleCPUOffloadConnector",
    "OffloadingConnector",
    "NixlConnector",
    "LMCacheConnectorV1",
    "MultiConnector",
]


@pytest.fixture(scope="module")
def gemma(models):
    return models("gemma3", W)


@pytest.mark.engine
@pytest.mark.feature(
    "KV connector without hybrid support (LMCache-type)", "passes through"
)
def test_case_22_a_connector_that_turns_the_hybrid_manager_off(gemma, tmp_path):
    """It stores every prompt and loads it in the second round, with and without rings.

    vLLM turns its hybrid manager off for it; outputs stay right, and both are said.
    """
    prompts = random_prompts([W, 200, 5 * W])
    expected = run(gemma, STOCK, prompts, 24)
    connector = dict(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    with Said() as said, engine(gemma, RING, kv_transfer_config=connector) as e:
        assert not e.rings
        assert_same(expected, e.run(prompts, 24))
        assert len(list(tmp_path.iterdir())) == len(prompts)
        e.reset_prefix_cache()
        loaded = e.run(prompts, 24)
    assert_same(expected, loaded)
    assert all(output.cached > 0 for output in loaded)
    reason = "--kv-transfer-config (connector 'ExampleConnector')"
    assert any(reason in line for line in said.lines)
    assert any("NOT in use" in line for line in said.lines)


@pytest.mark.engine
def test_a_connector_with_hybrid_support_passes_through(gemma):
    """The hybrid manager stays on: stock sliding-window layers, not rings."""
    connector = dict(kv_connector="DecodeBenchConnector", kv_role="kv_both")
    with Said() as said, engine(gemma, RING, kv_transfer_config=connector) as e:
        assert not e.rings
        assert len(e.managers) > 1
    assert any("DecodeBenchConnector" in line for line in said.lines)


@pytest.mark.feature(
    "KV offloading (simple, offloading connector), NIXL and P/D", "passes through"
)
@pytest.mark.parametrize("name", CONNECTORS)
@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_every_connector_passes_through(gemma, name, role):
    config = make_config(gemma, block_size=32)
    assert pass_through_reason(config) is None
    config.kv_transfer_config = KVTransferConfig(kv_connector=name, kv_role=role)
    check_supported(config)
    assert name in pass_through_reason(config)
