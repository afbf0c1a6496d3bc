"""Calls to Ray actors, from a process that has joined Ray, and noticing that Ray's head has lost its state.

Ray's nodes and actors may run on beside a new head that does not know them. Then the pool is created again, and two
shards have one journal; so a shard that the head has lost must end.
"""

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from inspect import Parameter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from stepwell.common.async_calls import ignore_failure
from stepwell.errors import PoolUnavailable, StepwellError
from stepwell.pool.api.transport import ActorAway, ActorFailed, ActorMissing

if TYPE_CHECKING:
    from ray.actor import ActorHandle

ALL_ARGUMENTS = (Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD))

MARK = b"stepwell:cluster"
"""A key with the head. The first process that looks sets its value; a head that has lost its state has lost it."""
WATCH_INTERVAL = 2.0
"""Seconds between two looks."""
MOST_FAILURES = 5
"""Failed questions to a head that listens, after which its state counts as lost."""
PROBE_TIMEOUT = 3.0


class RayTransport:
    """Finds actors by name, and finds them again after a restart. Implements ActorTransport."""

    connections = 1

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._handles: dict[str, ActorHandle[Any]] = {}
        self._finding: dict[str, asyncio.Task[ActorHandle[Any]]] = {}

    async def call(self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        from ray.exceptions import RayActorError, RayTaskError  # see ray_cluster.py

        handle = self._handles.get(actor) or await self._find(actor)
        call = getattr(handle, method, None)
        if call is None:
            raise PoolUnavailable(
                f"{actor} is of another release, which has no {method}: bring both to the same release"
            )
        try:
            return await call.remote(*args, **kwargs)
        except RayActorError as failure:
            self._handles.pop(actor, None)
            raise ActorAway(type(failure).__name__) from None
        except StepwellError as refusal:
            raise getattr(refusal, "cause", refusal) from None  # Ray wraps it in a traceback of the actor
        except RayTaskError as failure:
            raise ActorFailed(f"{type(failure.cause).__name__}: {failure.cause}", str(failure)) from None

    async def _find(self, actor: str) -> "ActorHandle[Any]":
        """One question at a time for each actor: without a head, Ray's answer takes a minute, and a thread."""
        import ray

        finding = self._finding.get(actor)
        if finding is None:
            finding = asyncio.create_task(asyncio.to_thread(ray.get_actor, actor, self._namespace))
            self._finding[actor] = finding
            finding.add_done_callback(lambda _: self._finding.pop(actor))
            finding.add_done_callback(ignore_failure)
        try:
            handle = await asyncio.shield(finding)
        except ValueError:
            raise ActorMissing(actor) from None
        _accept_all_arguments(handle)
        self._handles[actor] = handle
        return handle


def _accept_all_arguments(handle: "ActorHandle[Any]") -> None:
    """The actor checks them itself. Ray knows no arguments of an actor whose class this process cannot load, as that of
    a pool of an older release (see common/message_format.py)."""
    for parameters in vars(handle).get("_ray_method_signatures", {}).values():
        parameters[:] = ALL_ARGUMENTS


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
