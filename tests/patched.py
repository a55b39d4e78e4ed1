# SPDX-License-Identifier: Apache-2.0
"""Run on vLLM with the source patches: what they do, and what the plugin then does.

See ``test_source_patches``. Prints a line of JSON that begins with ``ANSWERS``.
"""

import copyreg
import json
import pickle
import sys
from pathlib import Path

import torch

WINDOWS = ([10, None], [10], [None])


def main(model: Path) -> None:
    import vllm
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        SlidingWindowSpec,
        replace_as,
    )
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    # 0004: before anything else, a plugin's spec first.
    from vllm_ringwindow.core.manager import RingBlockManager
    from vllm_ringwindow.core.spec import RingWindowSpec

    KVCacheSpecRegistry.register(RingWindowSpec, RingBlockManager)
    common = dict(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    full = FullAttentionSpec(**common)
    assert KVCacheSpecRegistry.get_manager_class(full) is FullAttentionManager

    import vllm.v1.engine.core  # two patches are of it, once it is loaded
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.core import kv_cache_utils

    load_general_plugins()
    from tests.harness import ANSWERS
    from tests.simulator import make_config
    from tests.test_compat import WRAPPED, OneMoreField, function_of
    from tests.test_coordinator import block_ids
    from tests.test_simulated_scheduler import busy
    from vllm_ringwindow import compat

    # 0001: by name, without our reducer.
    assert AttentionBackendEnum not in copyreg.dispatch_table
    for member in (AttentionBackendEnum["RING"], AttentionBackendEnum.CPU_ATTN):
        assert pickle.loads(pickle.dumps(member)) is member

    # 0003: a hook's error is the caller's.
    try:
        make_config(model, additional_config={"ringwindow": {"metricz": 1}})
    except ValueError as error:
        refused = str(error)

    # 0006: the fields of a subclass are dropped, not those of vLLM's own specs.
    specs = {"full": full, "sliding": OneMoreField(**common, sliding_window=64)}
    promoted = kv_cache_utils._promote_local_kv_cache_specs(specs)["sliding"]
    assert type(promoted) is FullAttentionSpec and promoted.sliding_window == 64
    try:
        replace_as(SlidingWindowSpec(**common, sliding_window=64), FullAttentionSpec)
        raise AssertionError("extra_retained_tokens was dropped unasked")
    except TypeError:
        pass

    # 0007, 0008: the scheduler, with each stored position checked.
    scheduled = {str(w): block_ids(busy(model, windows=w)) for w in WINDOWS}

    answers = dict(
        vllm=vllm.__file__,
        states={patch.name: patch.apply().name for patch in compat.PATCHES},
        wrapped=[
            f"{owner}.{name}"
            for found in WRAPPED.values()
            for owner, name in found
            if hasattr(function_of(owner, name), compat.MARK)
        ],
        refused=refused,
        scheduled=scheduled,
    )
    print("\n" + ANSWERS + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
