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
    import ray

    ray.init(
        num_cpus=4,
        object_store_memory=object_store_memory,
        include_dashboard=False,
        log_to_driver=False,
        namespace="tests",
    )
    try:
        yield RayCluster(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()
