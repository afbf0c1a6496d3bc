"""The actors of one DataPool, called by name: found, found again when they break, waited for while they restart."""

import asyncio
from typing import Any
from zlib import crc32

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from stepwell.errors import PoolUnavailable, StepwellError
from stepwell.pool.api.plan import PoolPlan

PATIENCE = 30.0
"""Seconds a call waits for a shard that is away; a killed one is back after some three."""
PAUSE = 0.2


def shard_of(prompt_uid: str, shards: int) -> int:
    """The index of the shard that holds a group. It is the same in every process, unlike Python's own hash."""
    return crc32(prompt_uid.encode()) % shards


class ShardSet:
    """Holds nothing but handles and the pool's plan, and finds both again."""

    def __init__(self, pool: str, namespace: str) -> None:
        self.pool = pool
        self.namespace = namespace
        self._handles: dict[str, ActorHandle[Any]] = {}
        self._plan: PoolPlan | None = None

    async def plan(self) -> PoolPlan:
        if self._plan is None:
            self._plan = await self.ask(self.pool, "plan")
        return self._plan

    async def names(self) -> tuple[str, ...]:
        return (await self.plan()).shard_names()

    async def owner(self, prompt_uid: str) -> str:
        """The shard of a group."""
        names = await self.names()
        return names[shard_of(prompt_uid, len(names))]

    async def ask_all(self, method: str, *args: Any, patience: float = PATIENCE) -> list[Any]:
        names = await self.names()
        return await asyncio.gather(*(self.ask(name, method, *args, patience=patience) for name in names))

    async def ask(
        self, shard: str, method: str, *args: Any, patience: float = PATIENCE, await_restart: bool = True
    ) -> Any:
        """Call a shard, again while it restarts unless told not to, for `patience` seconds at most."""
        why = "it did not answer"
        try:
            async with asyncio.timeout(patience):
                while True:
                    try:
                        return await getattr(await self._handle(shard), method).remote(*args)
                    except RayActorError as failure:
                        self._handles.pop(shard, None)
                        why = f"it is away ({type(failure).__name__})"
                        if not await_restart:
                            raise PoolUnavailable(f"DataPool {shard!r}: no {method}; {why}") from None
                    await asyncio.sleep(PAUSE)
        except TimeoutError:
            raise PoolUnavailable(f"DataPool {shard!r}: no {method} within {patience:g} s; {why}") from None
        except StepwellError as refusal:
            raise getattr(refusal, "cause", refusal) from None  # Ray wraps it in a traceback of the actor's

    async def _handle(self, shard: str) -> ActorHandle[Any]:
        if shard not in self._handles:
            try:
                self._handles[shard] = await asyncio.to_thread(ray.get_actor, shard, self.namespace)
            except ValueError:
                raise PoolUnavailable(
                    f"no DataPool named {shard!r} in Ray namespace {self.namespace!r}; create it with: "
                    f"stepwell pool --name {self.pool} --ray-namespace {self.namespace}"
                ) from None
        return self._handles[shard]
