# SPDX-License-Identifier: Apache-2.0
"""A job's Ray cluster: start or join it, and what its nodes and engines say."""

import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_ringwindow.batch.rows import JobError
from vllm_ringwindow.cli.common import first_line

# In the logs of engines.
RING_LINE = r"\] (ring: .*)"
NO_ENGINE = r"ERROR [^]]*\] (\w+(?:Error|Exception): .*)"


@contextmanager
def ray_of(address: str | None) -> Iterator[str]:
    """A cluster of this machine alone, or the one at ``address``; gives its logs.

    Raises:
        JobError: there is none.
    """
    import ray

    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit() and "/" not in host:
        # Ray would try for minutes, and then end the process.
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            reason = error.strerror or error
            raise JobError(f"--ray-address {address}: {reason}") from None
    if address is None and os.environ.get("VLLM_LOGGING_LEVEL") != "DEBUG":
        # Engines inherit it. What they say about rings is not an error.
        os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
    try:
        context = ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if address is None else None,
        )
    except (OSError, ValueError, RuntimeError) as error:
        where = f"--ray-address {address}" if address else "Ray does not start"
        raise JobError(f"{where}: {first_line(error)}") from error
    try:
        yield f"{context.address_info['session_dir']}/logs"
    finally:
        ray.shutdown()


def _on_every_node(ask: Callable[..., Any], *args: Any) -> list[tuple[str, Any]]:
    """(address, answer) of each node that is alive; one that cannot, its RayError."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    task = ray.remote(num_cpus=0)(ask)
    asked = []
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked.append(task.options(scheduling_strategy=there).remote(*args))
    answers: list[tuple[str, Any]] = []
    for node, ref in zip(nodes, asked):
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayError as error:
            answer = error
        answers.append((node["NodeManagerAddress"], answer))
    return answers


def check_nodes() -> None:
    """Every node has the plugin, or the one that has not is named.

    Raises:
        JobError: a node cannot load it.
    """
    for address, problem in _on_every_node(_knows_the_ring):
        if problem is not None:
            reason = problem if isinstance(problem, str) else last_line(problem)
            raise JobError(f"node {address}: {reason}")


def what_engines_say(logs: str, since: float) -> tuple[str, ...]:
    """The lines about rings that engines have logged, each once.

    Args:
        logs: the folder of Ray's logs, the same on every node.
        since: time of day, in seconds; older files are other jobs'.
    """
    return _logged(RING_LINE, logs, since) or ("ring: not a word in the engines' logs",)


def why_no_engine(logs: str, since: float) -> str | None:
    """The last exception that an engine's core has logged."""
    found = _logged(NO_ENGINE, logs, since)
    return found[-1] if found else None


def _logged(pattern: str, logs: str, since: float) -> tuple[str, ...]:
    found: list[str] = []
    for _, lines in _on_every_node(_matches, pattern, logs, since):
        found += lines if isinstance(lines, list) else []  # the node is gone
    return tuple(dict.fromkeys(found))


def _matches(pattern: str, logs: str, since: float) -> list[str]:
    found = []
    for file in sorted(Path(logs).glob("worker-*")):
        if file.stat().st_mtime >= since:
            found += re.findall(pattern, file.read_text(errors="replace"))
    return found


def _knows_the_ring() -> str | None:
    """Runs on a node: why it could not run an engine with rings, or None."""
    import importlib.metadata

    group = importlib.metadata.entry_points(group="vllm.general_plugins")
    if not any(e.name == "ringwindow" for e in group):
        return "vllm-ringwindow is not installed there"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "ringwindow" not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed!r} there leaves out 'ringwindow'"
    return None


def last_line(error: BaseException) -> str:
    """The last line that says something, of what happened in a process of Ray's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if "https://errors.pydantic.dev/" not in line]
    if len(lines) > 1 and " [type=" in lines[-1]:  # pydantic's; the option's name first
        return f"{lines[-2]}: {lines[-1].partition(' [type=')[0]}"
    return lines[-1] if lines else type(error).__name__
