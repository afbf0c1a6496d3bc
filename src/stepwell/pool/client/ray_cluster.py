"""Joining a Ray cluster, with one clear line when that fails.

Ray's core writes why it cannot join to file descriptor 2, over and over, and raises something that does not say. So the
descriptor is held back while joining, read for the reason, and played back unless the reason is known.
"""

import logging
import os
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import ray
from ray.exceptions import AuthenticationError

from stepwell.errors import RayUnreachable

PROBE_TIMEOUT = 3.0
JOIN_TIMEOUT = 45.0
"""Ray itself waits for minutes for a cluster that is gone."""
LOOK_EVERY = 0.1
OF_UP = "one that `stepwell up` started is joined after: . .stepwell/env"
WRONG_TOKEN = b"InvalidAuthToken"


def join_ray(address: str, namespace: str) -> None:
    """Make this process part of the cluster at `address` (host:port, or "auto" for the one on this machine)."""
    if ray.is_initialized():
        return
    where = _host_and_port(address)
    if where is not None and not _listens(*where):
        raise RayUnreachable(f"no Ray cluster listens at {address}; start one with: ray start --head")
    try:
        with _stderr_held() as complaints:
            _join(address, namespace, complaints)
    except AuthenticationError:
        raise RayUnreachable(_token_text(address)) from None
    except ConnectionError:
        raise RayUnreachable(
            f"no Ray cluster found at {address!r}; start one with: ray start --head; {OF_UP}"
        ) from None


def _join(address: str, namespace: str, complaints: Callable[[], bytes]) -> None:
    """In a thread, for Ray's own waiting cannot be bounded."""
    joining: Future[None] = Future()

    def join() -> None:
        try:
            ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
            joining.set_result(None)
        except Exception as failure:  # noqa: BLE001 - handed on to whoever waits
            joining.set_exception(failure)

    threading.Thread(target=join, name="join-ray", daemon=True).start()
    for _ in range(int(JOIN_TIMEOUT / LOOK_EVERY)):
        try:
            return joining.result(LOOK_EVERY)
        except TimeoutError:
            if WRONG_TOKEN in complaints():
                raise RayUnreachable(_token_text(address)) from None
    raise RayUnreachable(
        f"the Ray cluster at {address} did not answer within {JOIN_TIMEOUT:g} s; is it gone? "
        f"Start one with: ray start --head; {OF_UP}"
    )


@contextmanager
def _stderr_held() -> Iterator[Callable[[], bytes]]:
    """Hold file descriptor 2 back; gives a function that reads what came. Played back unless a reason was found."""
    with tempfile.TemporaryFile() as held:

        def read() -> bytes:
            return os.pread(held.fileno(), 1 << 20, 0)

        real = os.dup(2)
        os.dup2(held.fileno(), 2)
        explained = False
        try:
            yield read
        except (RayUnreachable, AuthenticationError, ConnectionError):
            explained = True
            raise
        finally:
            os.dup2(real, 2)
            os.close(real)
            if not explained:
                os.write(2, read())


def _token_text(address: str) -> str:
    return (
        f"Ray at {address} did not let this process in: its token is missing or wrong. Set RAY_AUTH_MODE=token and "
        "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the token the cluster was started with"
    )


def _host_and_port(address: str) -> tuple[str, int] | None:
    found = re.fullmatch(r"([\w.-]+):(\d+)", address)
    return (found[1], int(found[2])) if found else None


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=PROBE_TIMEOUT):
            return True
    except OSError:
        return False
