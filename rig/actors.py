"""The actors of a test's namespace: where they run, and whether one that was killed is back."""

import os
from typing import Any

import ray

from rig.waiting import wait_until


def actor(name: str, namespace: str) -> Any:
    return ray.get_actor(name, namespace)


def pid_of(name: str, namespace: str) -> int:
    return int(_told_by(name, namespace, os.getpid))


def node_of(name: str, namespace: str) -> str:
    """The id of its node."""
    return str(_told_by(name, namespace, lambda: ray.get_runtime_context().get_node_id()))


def wait_until_back(name: str, namespace: str, killed: int) -> None:
    """In another process than the one that was killed."""

    def is_back() -> bool:
        try:
            return pid_of(name, namespace) != killed
        except ray.exceptions.ActorUnavailableError:
            return False

    wait_until(is_back, f"{name} to be back")


def _told_by(name: str, namespace: str, question: Any) -> Any:
    return ray.get(actor(name, namespace).__ray_call__.remote(lambda _: question()))
