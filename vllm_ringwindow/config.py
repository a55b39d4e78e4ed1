# SPDX-License-Identifier: Apache-2.0
"""The plugin's options: ``--additional-config '{"ringwindow": {...}}'``.

Nothing needs setting. They are for whoever looks for a fault or measures.
"""

from dataclasses import fields
from typing import TYPE_CHECKING

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "ringwindow"


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class RingConfig:
    """All options, each with its default."""

    metrics: bool = True
    """Report rings and blocks beside vLLM's own metrics (``vllm:ringwindow_...``)."""

    rest: bool = True
    """Do not ask the block managers about requests that need nothing. Off, every
    group is asked about every request in every step, as in stock vLLM."""

    check: bool = False
    """Check every ring before each step and stop the engine if one is damaged. Slow:
    every block of every request is looked at."""


def ring_config(vllm_config: "VllmConfig") -> RingConfig:
    """The options of an engine.

    Raises:
        ValueError: an unknown key or a bad value, naming it and what is allowed.
    """
    additional = vllm_config.additional_config
    given = additional.get(KEY, {}) if isinstance(additional, dict) else {}
    where = f"--additional-config {KEY}"
    if not isinstance(given, dict):
        raise ValueError(f"{where}: expected an object of options, got {given!r}")
    try:
        return RingConfig(**given)
    except ValidationError as error:
        first = error.errors()[0]
        key = first["loc"][0]
        known = ", ".join(field.name for field in fields(RingConfig))
        if "unexpected" in first["type"]:
            raise ValueError(
                f"{where}: unknown key {key!r}; known keys: {known}"
            ) from None
        raise ValueError(
            f"{where}: {key}={first['input']!r}: {first['msg'].lower()}"
        ) from None
