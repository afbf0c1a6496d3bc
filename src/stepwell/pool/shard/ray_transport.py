"""Calls to Ray actors, from a process that has joined Ray."""

import asyncio
from collections.abc import Mapping, Sequence
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from stepwell.common.async_calls import ignore_failure
from stepwell.errors import PoolUnavailable, StepwellError
from stepwell.pool.api.transport import ActorAway, ActorFailed, ActorMissing

if TYPE_CHECKING:
    from ray.actor import ActorHandle


ALL_ARGUMENTS = (Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD))


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
