"""Noticing that Ray's head has lost its state.

Ray's nodes and actors may run on beside a new head that does not know them. Then the pool is created again, and two
shards have one journal; so a shard that the head has lost must end.
"""

import socket
import time
from uuid import uuid4

MARK = b"stepwell:cluster"
"""A key with the head. The first process that looks sets its value; a head that has lost its state has lost it."""
WATCH_INTERVAL = 2.0
"""Seconds between two looks."""
MOST_FAILURES = 5
"""Failed questions to a head that listens, after which its state counts as lost."""
PROBE_TIMEOUT = 3.0


def wait_until_head_loses_state() -> None:
    """Blocks, in a process that has joined Ray. A head that is away does not count: it may come back with its state."""
    import ray
    from ray.experimental import internal_kv

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    internal_kv._internal_kv_put(MARK, uuid4().bytes, overwrite=False)
    mark, failures = internal_kv._internal_kv_get(MARK), 0
    while failures < MOST_FAILURES:
        time.sleep(WATCH_INTERVAL)
        try:
            if internal_kv._internal_kv_get(MARK) != mark:
                return
            failures = 0
        except Exception:  # noqa: BLE001 - whatever Ray raises
            failures += listens(host, int(port))


def listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=PROBE_TIMEOUT):
            return True
    except OSError:
        return False
