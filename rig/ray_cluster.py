"""A real Ray for tests: on loopback only, with a token of its own, one for the whole run."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps every port on 127.0.0.1
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_BACKEND_LOG_LEVEL": "error",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_worker_niceness": "0",  # by default actors get about 2 % of a core that others want too
}
LOOPBACK = "127.0.0.1"
os.environ.update(SETTINGS)  # Ray reads them when it is imported; child processes inherit them


@dataclass(frozen=True)
class RayCluster:
    address: str

    @contextmanager
    def namespace(self, name: str | None = None) -> Iterator[str]:
        """One no other test uses, unless it is named; its actors end with it."""
        import ray
        from ray.util import list_named_actors

        name = name or f"test-{secrets.token_hex(4)}"
        yield name
        for actor in list_named_actors(all_namespaces=True):
            if actor["namespace"] == name:
                ray.kill(ray.get_actor(actor["name"], name))


@contextmanager
def start_ray(object_store_memory: int = 256 * 2**20) -> Iterator[RayCluster]:
    """This process joins it. It has fewer processes than one that `ray.init` starts: no log monitor, no autoscaler."""
    import ray

    from rig.ray_nodes import kill_node_processes, start_node

    params = {"num_cpus": 4, "object_store_memory": object_store_memory, "node_ip_address": LOOPBACK}
    head = start_node(params, is_head=True)
    try:
        ray.init(address=head.gcs_address, namespace="tests", log_to_driver=False)
        yield RayCluster(head.gcs_address)
    finally:
        ray.shutdown()
        kill_node_processes(head)
