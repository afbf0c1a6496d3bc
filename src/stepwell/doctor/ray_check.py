"""A Ray cluster, joined and left again. A module of its own, for Ray takes a second to import."""

import ray

from stepwell.pool.client.ray_cluster import join_ray

NAMESPACE = "default"


def cluster(address: str) -> str:
    """What it has. RayUnreachable, or Ray's RuntimeError where versions differ, says why it cannot be joined."""
    was_there = ray.is_initialized()
    join_ray(address, NAMESPACE)
    try:
        nodes = sum(node["Alive"] for node in ray.nodes())  # type: ignore[no-untyped-call]
        cores = ray.cluster_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
        return f"Ray {ray.__version__} at {address}: {nodes} {'node' if nodes == 1 else 'nodes'}, {cores:g} CPUs"
    finally:
        if not was_there:
            ray.shutdown()
