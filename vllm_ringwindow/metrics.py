# SPDX-License-Identifier: Apache-2.0
"""Rings and their blocks beside vLLM's own metrics, in its Prometheus endpoint.

The engine core counts (:class:`EngineCounts`); the figures ride to the frontend in the
scheduler's stats and are published there (:class:`RingMetrics`). They take the place of
a KV connector's, which an engine with rings has not.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, Counter, Gauge

from vllm_ringwindow import report
from vllm_ringwindow.config import ring_config
from vllm_ringwindow.state import ring_managers

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

PREFIX = "vllm:ringwindow_"
GAUGES = {
    "rings": "Rings in use: one per request and group of sliding-window layers.",
    "ring_blocks": "KV cache blocks that rings hold, shared ones once per request.",
    "staging_bytes": "Bytes of prefill staging on each worker.",
}
COUNTERS = {
    "fresh_blocks": "Blocks that rings took from the pool.",
    "recycled_blocks": "Blocks that moved on to a later position in place.",
    "released_blocks": "Blocks that rings gave back to the pool.",
    "retained_blocks": "Fresh blocks for a prefix to be hit, not for the window.",
    "deferred_hits": "Requests that waited a step for a prefix being written.",
}


class EngineCounts:
    """The engine's side: figures of every ring group together."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._managers = ring_managers(scheduler)
        config = scheduler.kv_cache_manager.kv_cache_config
        self._staging_bytes = report.staging_bytes(scheduler.vllm_config, config)
        self._on = bool(self._managers) and ring_config(scheduler.vllm_config).metrics

    def __call__(self) -> dict[str, int] | None:
        """Counters as totals; None without rings or with metrics switched off."""
        if not self._on:
            return None
        counts = [manager.counts for manager in self._managers]
        return {
            "rings": sum(manager.num_rings for manager in self._managers),
            "ring_blocks": sum(c.held for c in counts),
            "staging_bytes": self._staging_bytes,
            "fresh_blocks": sum(c.fresh for c in counts),
            "recycled_blocks": sum(c.recycled for c in counts),
            "released_blocks": sum(c.released for c in counts),
            "retained_blocks": sum(c.retained for c in counts),
            "deferred_hits": sum(c.deferred for c in counts),
        }


class RingMetrics:
    """The Prometheus side, in the frontend process."""

    def __init__(self, model_name: str, engines: Sequence[int]) -> None:
        for collector in list(REGISTRY._collector_to_names):
            if getattr(collector, "_name", "").startswith(PREFIX):
                REGISTRY.unregister(collector)
        labels = ["model_name", "engine"]
        self._model_name = model_name
        self._gauges = {
            name: Gauge(PREFIX + name, about, labels, multiprocess_mode="mostrecent")
            for name, about in GAUGES.items()
        }
        self._counters = {
            name: Counter(PREFIX + name, about, labels)
            for name, about in COUNTERS.items()
        }
        self._last: dict[tuple[int, str], int] = {}
        for engine in engines:
            self.observe(dict.fromkeys((*GAUGES, *COUNTERS), 0), engine)

    def observe(self, counts: Mapping[str, int], engine: int) -> None:
        """One step's figures; counters come as totals since the engine started."""
        labels = (self._model_name, str(engine))
        for name, gauge in self._gauges.items():
            gauge.labels(*labels).set(counts[name])
        for name, counter in self._counters.items():
            last = self._last.get((engine, name), 0)
            counter.labels(*labels).inc(max(counts[name] - last, 0))
            self._last[engine, name] = counts[name]
