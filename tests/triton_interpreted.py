# SPDX-License-Identifier: Apache-2.0
"""vLLM's real Triton kernels on a CPU, by Triton's interpreter: a process of its own.

``TRITON_INTERPRET=1 python -m tests.triton_interpreted MODEL`` prints, for each fault
named on the command line (or none), the largest difference of ring and stock.
"""

import os
import sys
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends

# vLLM's CPU build asks for a Triton that compiles for CPUs; interpreted needs none.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))


def main() -> int:
    import torch
    from vllm.plugins import load_general_plugins

    # The cache write's launch asks which tile sizes the device takes.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)

    load_general_plugins()
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    from tests import kernels
    from tests.test_gpu_backends import engine_config
    from vllm_ringwindow.attention.triton import RingTritonBackend

    config = engine_config(sys.argv[1])
    specs = kernels.specs(kernels.W, kernels.BLOCK)
    # In place, staged, both beside decodes, and decodes across a block border.
    both = kernels.Step({0: 1, 1: 60, 2: 20})
    steps = [*kernels.STEPS[:2], both, *[kernels.Step({0: 1, 1: 1, 2: 1})] * 8]
    for fault in ("none", "window"):
        stock = kernels.Layer(config, TritonAttentionBackend, specs["stock"], 4)
        ring = kernels.Layer(config, RingTritonBackend, specs["ring"], 4)
        if fault == "window":
            left, right = ring.impl.sliding_window
            ring.impl.sliding_window = (left - 1, right)
        print(f"WORST {fault} {kernels.worst_difference(stock, ring, steps)}")
    print(f"WORST view {view_difference()}")
    return 0


def view_difference() -> int:
    """Elements in which the fused view differs from the reference."""
    import torch

    from vllm_ringwindow.attention.view import view_reference
    from vllm_ringwindow.attention.view_kernel import view_fused

    generator = torch.Generator().manual_seed(0)
    differ = 0
    for rows, ring, window, block in (
        (1, 4, 40, 16),
        (7, 5, 512, 128),
        (33, 65, 1024, 16),
    ):
        table = torch.randint(0, 9999, (rows, 300), generator=generator).int()
        lens = torch.randint(1, 300 * block, (rows,), generator=generator).int()
        new = torch.randint(1, 4, (rows,), generator=generator).clamp(max=lens)
        starts = torch.cat([torch.zeros(1), new.cumsum(0)]).int()
        lens[-1], starts[-1] = 0, starts[-2]  # a padded row
        found = []
        for view in (view_reference, view_fused):
            out = torch.zeros(rows, ring, dtype=torch.int32)
            out_lens = torch.zeros(rows, dtype=torch.int32)
            view(table, lens, starts, out, out_lens, window, block)
            found.append((out, out_lens))
        for a, b in zip(*found):
            differ += int((a != b).sum())
    return differ


if __name__ == "__main__":
    sys.exit(main())
