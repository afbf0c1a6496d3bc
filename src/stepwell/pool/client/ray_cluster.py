"""Joining a Ray cluster, or starting one for this process.

- Ray reads its settings from the environment when it is imported. So this module imports Ray inside its functions.
- Ray's core writes the reason why it cannot join to file descriptor 2, repeatedly, and its exception does not name it.
  So the descriptor is redirected while joining and searched for the reason; unknown output is written out afterwards.
"""

import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from stepwell.common.listening import LINK
from stepwell.errors import RayRefused, RayUnreachable
from stepwell.pool.shard.ray_transport import listens

log = logging.getLogger("stepwell.pool")

JOIN_TIMEOUT = 45.0
"""Seconds. Ray itself waits for minutes for a cluster that is gone."""
CHECK_INTERVAL = 0.1
UP_HINT = "one that `stepwell up` started is joined after: . .stepwell/env"
WRONG_TOKEN = b"InvalidAuthToken"
TOO_SLOW = "timed out during startup"
"""Ray says so of its own processes, after 30 s."""
LOCAL_CPUS = 2
"""The actors of the pool and of the rewards ask for none."""
QUIET_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
NO_SECOND = {"RAY_ENABLE_AUTO_CONNECT": "0"}
"""Without it a call of Ray after its end starts another cluster, in a folder that is open to all users."""
RAY_FOLDER = "sw-"
"""What the names of the folders for the files of a Ray cluster begin with."""
LONGEST_PARENT = 27
"""Characters: a socket's path has at most 107, and Ray's part of it takes the others."""
OVERRIDING_SETTINGS = ("RAY_ADDRESS", "RAY_AUTH_TOKEN")
"""Settings in the environment that would lead to another cluster."""


def join_ray(address: str, namespace: str) -> None:
    """Make this process part of the cluster at `address` (host:port, or "auto" for this user's one on this machine)."""
    if address.startswith(LINK):
        raise RayUnreachable(
            f"{address} is a link, and this command needs Ray itself: run it on a machine of the Ray cluster, with "
            "--ray-address host:port. Gateways, dashboards and Atropos servers use links"
        )
    if address == AUTO and not ("ray" in sys.modules and sys.modules["ray"].is_initialized()):
        address = _find_own()  # before Ray is imported: it sets how to join
    import ray
    from ray.exceptions import AuthenticationError

    if ray.is_initialized():
        return
    if (missing := why_no_cluster(address)) is not None:
        raise RayUnreachable(missing)
    try:
        with _redirected_stderr() as read_stderr:
            _join(address, namespace, read_stderr)
    except AuthenticationError:
        raise RayRefused(_token_text(address)) from None
    except ConnectionError:
        raise RayUnreachable(
            f"no Ray cluster found at {address!r}; start one with: ray start --head; {UP_HINT}"
        ) from None


def _find_own() -> str:
    """The address of this user's cluster, whose variables are set in this process."""
    settings = cluster_settings()
    if not settings:
        raise RayUnreachable(
            f"no Ray cluster of yours was found on this machine; start one with: ray start --head; {UP_HINT}; "
            f"or {NAME_IT}"
        )
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    return settings["RAY_ADDRESS"]


def why_no_cluster(address: str) -> str | None:
    """A reason if nothing listens at an address host:port. It does not import Ray, so it can be asked often."""
    found = re.fullmatch(r"([\w.-]+):(\d+)", address)
    if found is None or listens(found[1], int(found[2])):
        return None
    return f"no Ray cluster listens at {address}; start one with: ray start --head"


@contextmanager
def local_ray(namespace: str, *, token: Path, store: int, folder: Path) -> Iterator[Mapping[str, str]]:
    """A Ray cluster on loopback that ends with the block. `store` is the size of its object store in bytes; more data
    spills to disk. Ray's sockets, logs and spilled data are in `folder`: Ray lets every user into its own folders, so
    this one must be private.

    Yields the settings, RAY_ADDRESS included, that a process needs in its environment to join the cluster. Child
    processes inherit them.
    """
    settings = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps every port on 127.0.0.1
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_worker_niceness": "0",  # by default the shards get about 2 % of a core that other processes want too
    }
    for name in OVERRIDING_SETTINGS:
        os.environ.pop(name, None)
    os.environ.update(QUIET_SETTINGS | settings | NO_SECOND)
    import ray

    start = partial(
        ray.init,
        address="local",
        num_cpus=LOCAL_CPUS,
        object_store_memory=store,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace=namespace,
        _temp_dir=str(folder / "ray"),
    )
    try:
        start()
    except Exception as failure:
        if TOO_SLOW not in str(failure):
            raise
        log.warning("Ray's processes did not start within its own 30 s; it is started once more")
        start()  # on a busy machine the second attempt finds Ray's programs in memory
    try:
        yield settings | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    finally:
        ray.shutdown()


def _join(address: str, namespace: str, read_stderr: Callable[[], bytes]) -> None:
    """Join in a thread, because Ray's own wait has no bound."""
    import ray

    joining: Future[None] = Future()

    def join() -> None:
        try:
            ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
            joining.set_result(None)
        except Exception as failure:  # noqa: BLE001 - raised again where the result is awaited
            joining.set_exception(failure)

    threading.Thread(target=join, name="join-ray", daemon=True).start()
    for _ in range(int(JOIN_TIMEOUT / CHECK_INTERVAL)):
        try:
            return joining.result(CHECK_INTERVAL)
        except TimeoutError:
            if WRONG_TOKEN in read_stderr():
                raise RayRefused(_token_text(address)) from None
    raise RayUnreachable(
        f"the Ray cluster at {address} did not answer within {JOIN_TIMEOUT:g} s; is it gone? "
        f"Start one with: ray start --head; {UP_HINT}"
    )


@contextmanager
def _redirected_stderr() -> Iterator[Callable[[], bytes]]:
    """Redirect file descriptor 2 to a file; yields a function that reads it. Written out unless a reason was found."""
    from ray.exceptions import AuthenticationError

    with tempfile.TemporaryFile() as file:

        def read() -> bytes:
            return os.pread(file.fileno(), 1 << 20, 0)

        original = os.dup(2)
        os.dup2(file.fileno(), 2)
        explained = False
        try:
            yield read
        except (RayUnreachable, AuthenticationError, ConnectionError):
            explained = True
            raise
        finally:
            os.dup2(original, 2)
            os.close(original)
            if not explained:
                os.write(2, read())


def _token_text(address: str) -> str:
    return (
        f"Ray at {address} did not let this process in: its token is missing or wrong. Set RAY_AUTH_MODE=token and "
        "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the token the cluster was started with"
    )


def make_ray_folder() -> Path:
    """A new folder for the files of a Ray cluster: its sockets, logs and spilled data. It is in RAY_TMPDIR or in the
    folder for temporary files, if their paths are short enough.

    Its mode is 0700: Ray gives its own folders 0777, so every user of the machine could connect to its object store.
    """
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix=RAY_FOLDER, dir=parent if len(parent) <= LONGEST_PARENT else "/tmp"))
