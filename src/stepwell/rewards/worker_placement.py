"""Where reward workers run: on nodes that offer CPUs, and beside Ray's head only if there is no other place.

The nodes of gateways and dashboards offer no CPUs to others, so that nothing takes the time of agents' calls.
"""

import logging
from typing import Any, TypedDict

import ray
from ray.util.scheduling_strategies import NodeLabelSchedulingStrategy, NotIn

log = logging.getLogger("stepwell.rewards")

CPUS = 1.0
"""The CPUs of each worker, unless told."""
SHARE = 0.001
"""The CPUs that a worker without CPUs reserves: Ray does not place an actor that asks for nothing, it takes any
node."""
HEAD = "node:__internal_head__"
"""A resource that only the head's node has."""
NODE_ID = "ray.io/node-id"
"""A label that every node has."""


class WorkerPlacement(TypedDict):
    """Options of a Ray actor."""

    num_cpus: float
    scheduling_strategy: str | NodeLabelSchedulingStrategy


def place_workers(workers: int, cpus: float | None) -> WorkerPlacement:
    """Places so many new workers. Without `cpus`, each gets one CPU if there are enough."""
    free = ray.available_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    if cpus is None:
        cpus = CPUS if free >= workers * CPUS else 0.0
        if not cpus:
            log.warning("the Ray cluster has %g free CPUs for %d reward workers, so they reserve none", free, workers)
    if free >= workers * SHARE:
        cpus = max(cpus, SHARE)
    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    offering = {node["NodeID"] for node in nodes if node["Resources"].get("CPU", 0.0) >= CPUS}
    wanted = offering - {node["NodeID"] for node in nodes if HEAD in node["Resources"]} or offering
    avoided = [node["NodeID"] for node in nodes if node["NodeID"] not in wanted]
    if not avoided or not wanted or (cpus > 0 and wanted == offering):
        return WorkerPlacement(num_cpus=cpus, scheduling_strategy="SPREAD")
    elsewhere = NotIn(*avoided)  # type: ignore[no-untyped-call]
    return WorkerPlacement(num_cpus=cpus, scheduling_strategy=NodeLabelSchedulingStrategy({NODE_ID: elsewhere}))
