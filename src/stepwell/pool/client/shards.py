"""The shards of one DataPool, as a client reaches them.

- A call is routed by prompt_uid alone.
- Calls are typed: `shards.at(name)` is a ShardService. The only untyped call is the one inside a transport.
- A call to a shard that restarts is repeated until its timeout. PoolUnavailable says why it failed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast
from zlib import crc32

from stepwell.errors import PoolUnavailable, StepwellError
from stepwell.pool.api.plan import PoolPlan

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from stepwell.pool.shard.service import ShardService

S = TypeVar("S")
T = TypeVar("T")

CALL_TIMEOUT = 30.0
"""Seconds that a call waits for a shard. A killed shard is back after about three."""
RETRY_PAUSE = 0.2


def shard_of(prompt_uid: str, shards: int) -> int:
    """The index of the shard that holds a group. It is the same in every process, unlike Python's own hash."""
    return crc32(prompt_uid.encode()) % shards


class ShardAway(Exception):
    """The shard does not run now. It may come back."""


class ShardTransport(Protocol):
    """How a call gets to a shard."""

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """ShardAway if the shard does not run now; PoolUnavailable if there is no shard of that name."""


class RayTransport:
    """Calls the Ray actors of a pool. It finds them by name, and finds them again after a restart."""

    def __init__(self, pool: str, namespace: str) -> None:
        self._pool = pool
        self._namespace = namespace
        self._handles: dict[str, ActorHandle[Any]] = {}

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        from ray.exceptions import RayActorError  # see ray_cluster.py

        handle = self._handles.get(shard) or await self._find(shard)
        try:
            return await getattr(handle, method).remote(*args, **kwargs)
        except RayActorError as failure:
            self._handles.pop(shard, None)
            raise ShardAway(type(failure).__name__) from None
        except StepwellError as refusal:
            raise getattr(refusal, "cause", refusal) from None  # Ray wraps it in a traceback of the actor

    async def _find(self, shard: str) -> "ActorHandle[Any]":
        import ray

        try:
            handle = await asyncio.to_thread(ray.get_actor, shard, self._namespace)
        except ValueError:
            raise PoolUnavailable(
                f"no DataPool named {shard!r} in Ray namespace {self._namespace!r}; create it with: "
                f"stepwell pool --name {self._pool} --ray-namespace {self._namespace}"
            ) from None
        self._handles[shard] = handle
        return handle


class ShardSet:
    """All shards of one pool. It keeps nothing but the pool's plan."""

    def __init__(self, pool: str, transport: ShardTransport, *, timeout: float = CALL_TIMEOUT) -> None:
        self.pool = pool
        self.timeout = timeout
        """Seconds that a call takes at most, unless it has a timeout of its own."""
        self._transport = transport
        self._plan: PoolPlan | None = None

    async def plan(self) -> PoolPlan:
        if self._plan is None:
            self._plan = await self.at(self.pool).plan()
        return self._plan

    async def names(self) -> tuple[str, ...]:
        return (await self.plan()).shard_names()

    async def owner(self, prompt_uid: str) -> str:
        """The name of the shard that holds a group."""
        names = await self.names()
        return names[shard_of(prompt_uid, len(names))]

    async def call_owners(
        self, prompt_uids: Iterable[str], items: Sequence[S], call: Callable[[str, list[S]], Awaitable[Sequence[T]]]
    ) -> list[T]:
        """Call each shard with the items that belong to its groups. One answer per item, in the order of the items."""
        indexes: dict[str, list[int]] = {}
        for index, prompt_uid in enumerate(prompt_uids):
            indexes.setdefault(await self.owner(prompt_uid), []).append(index)
        calls = (call(shard, [items[index] for index in own]) for shard, own in indexes.items())
        answers = chain.from_iterable(await asyncio.gather(*calls))
        by_index = dict(zip(chain.from_iterable(indexes.values()), answers, strict=True))
        return [by_index[index] for index in range(len(items))]

    def at(self, shard: str, *, timeout: float | None = None, await_restart: bool = True) -> "ShardService":
        """The calls of one shard. A shard that restarts is waited for, unless `await_restart` is False."""
        call = partial(self._call, shard, self.timeout if timeout is None else timeout, await_restart)
        return cast("ShardService", _BoundShard(call))

    async def call_all(
        self, call: Callable[["ShardService"], Awaitable[T]], *, timeout: float | None = None
    ) -> list[T]:
        """The same call to every shard; answers in the order of `names`."""
        return await asyncio.gather(*(call(self.at(name, timeout=timeout)) for name in await self.names()))

    async def _call(
        self, shard: str, timeout: float, await_restart: bool, method: str, *args: Any, **kwargs: Any
    ) -> Any:
        reason = "it did not answer"
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        return await self._transport.call(shard, method, args, kwargs)
                    except ShardAway as away:
                        reason = f"it is away ({away})"
                        if not await_restart:
                            raise PoolUnavailable(f"DataPool {shard!r}: no {method}; {reason}") from None
                    await asyncio.sleep(RETRY_PAUSE)
        except TimeoutError:
            raise PoolUnavailable(f"DataPool {shard!r}: no {method} within {timeout:g} s; {reason}") from None


class ShardClient:
    """The base of what reaches the shards of one pool."""

    def __init__(self, shards: ShardSet) -> None:
        self.shards = shards


class _BoundShard:
    """Turns `.method(args)` into a call. `ShardSet.at` gives it the type ShardService."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        return partial(self._call, method)
