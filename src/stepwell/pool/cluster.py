"""Joining a Ray cluster, with one clear line when that fails. Ray itself is silent about why."""

import logging
import re
import socket

import ray
from ray.exceptions import AuthenticationError

from stepwell.errors import RayUnreachable

PROBE_TIMEOUT = 3.0


def join_ray(address: str, namespace: str) -> None:
    """Make this process part of the cluster at `address` (host:port, or "auto" for the one on this machine)."""
    if ray.is_initialized():
        return
    where = _host_and_port(address)
    if where is not None and not _listens(*where):
        raise RayUnreachable(f"no Ray cluster listens at {address}; start one with: ray start --head")
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    except AuthenticationError:
        raise RayUnreachable(_token_text(address)) from None
    except ConnectionError as failure:
        raise RayUnreachable(_explained(address, str(failure))) from None


def _explained(address: str, failure: str) -> str:
    where = _host_and_port(failure)
    if where is None:
        return f"no Ray cluster found at {address!r}; start one with: ray start --head"
    if _listens(*where):
        return _token_text("{}:{}".format(*where))
    return "the Ray cluster at {}:{} is gone; start one with: ray start --head".format(*where)


def _token_text(address: str) -> str:
    return (
        f"Ray at {address} did not let this process in: its token is missing or wrong. Set RAY_AUTH_MODE=token and "
        "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the token the cluster was started with"
    )


def _host_and_port(text: str) -> tuple[str, int] | None:
    found = re.search(r"([\w.-]+):(\d+)$", text)
    return (found[1], int(found[2])) if found else None


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=PROBE_TIMEOUT):
            return True
    except OSError:
        return False
