"""A Ray cluster of this process's own, on loopback, which ends with it.

It is joined by whoever has its settings in the environment; child processes inherit them. Ray reads them when it is
imported: so it is imported here, and by no one before.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CPUS = 2
"""The pool's and the rewards' actors ask for none."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
OVERRIDING = ("RAY_ADDRESS", "RAY_AUTH_TOKEN")
"""Settings that would lead another way, left in the environment by someone else."""


@contextmanager
def local_ray(namespace: str, *, token: Path, store: int) -> Iterator[Mapping[str, str]]:
    """Gives what a process needs in its environment to join it, RAY_ADDRESS among it. `store` is the size of its
    object store in bytes; what is more spills to disk."""
    settings = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps every port on 127.0.0.1
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
    }
    for name in OVERRIDING:
        os.environ.pop(name, None)
    os.environ.update(QUIET | settings)
    import ray

    ray.init(
        address="local",
        num_cpus=CPUS,
        object_store_memory=store,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace=namespace,
    )
    try:
        yield settings | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    finally:
        ray.shutdown()
