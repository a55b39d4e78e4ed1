# SPDX-License-Identifier: Apache-2.0
import os

# Read by vLLM at import: engines in this process, no compilation.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny matrices: a second thread only waits, and waits busily on a shared machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import functools

import pytest
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

from tests.harness import Models, had_rings

load_general_plugins()

# Once a process is enough, and the second scan trips over modules that an earlier
# engine imported (numba's, with ngram drafting): many engines share this process.
register_overrides = current_platform.register_triton_kernel_overrides
type(current_platform).register_triton_kernel_overrides = functools.cache(
    lambda cls=None: register_overrides()
)


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _feature_is_what_it_says(request):
    """A test of a feature that works has seen rings; one that passes through, none."""
    had_rings.clear()
    yield
    marker = request.node.get_closest_marker("feature")
    if marker is None:
        return
    outcome = marker.args[1]
    if outcome in ("works", "works (scheduler)"):
        assert any(had_rings), "no engine of this test had rings"
    elif outcome in ("passes through", "refused"):
        assert not any(had_rings), "an engine of this test had rings"
