"""Brings the policy version, and which versions are withdrawn, to every shard. A shard that is away gets it when it is
back.

- Only the newest version is delivered. A shard never gets an older one after a newer one.
- The version is remembered in this process only.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.serving_state import Serving
from stepwell.pool.client.shards import ShardSet

log = logging.getLogger("stepwell.pool")

RETRY_PAUSE = 0.5
"""Seconds."""


class VersionDelivery:
    def __init__(self, shards: ShardSet, note_serving: Callable[[Serving], None]) -> None:
        """`note_serving` is called with what the first shard answers."""
        self._shards = shards
        self._note_serving = note_serving
        self._version: int | None = None
        """The last that was to be delivered."""
        self._withdrawn: dict[str, tuple[int, ...]] = {}
        """By shard that does not know them yet."""
        self._told: set[str] = set()
        """Shards to which a version was sent, or is on its way."""
        shards.on_new_plan.append(self._tell_new_shards)
        self._sending: dict[str, asyncio.Task[None]] = {}
        """By shard, until it has the newest version."""

    async def deliver(self, version: int) -> None:
        """Returns when all shards have it, or, after `part_timeout`, as soon as one has it. If none answers for as long
        as a call may take, it is delivered later all the same."""
        await self._deliver(version, await self._shards.names(), self._shards.part_timeout)

    async def deliver_decided(self, serving: Serving) -> None:
        """To the other shards, what the first one has decided. Returns when they have it, or after the time that a call
        may take: who decided may end soon after, and then nobody brings it to them."""
        others = [name for name in await self._shards.names() if name != self._shards.pool]
        if others:
            self._withdrawn |= dict.fromkeys(others, serving.withdrawn)
            await self._deliver(serving.policy_version, others, self._shards.timeout)

    async def _deliver(self, version: int, names: Sequence[str], timeout: float) -> None:
        self._version = version
        for name in names:
            self._start(name)
        sending = [self._sending[name] for name in names]
        done, late = await asyncio.wait(sending, timeout=timeout)
        if not done:
            done, late = await asyncio.wait(sending, timeout=self._shards.timeout, return_when=asyncio.FIRST_COMPLETED)
        for sent in done:
            sent.result()  # what a shard refuses with is for the caller
        if late:
            missing = ", ".join(name for name in names if self._sending.get(name) in late)
            log.warning("policy version %d will be delivered to %s when it is back", version, missing)

    def _tell_new_shards(self, plan: PoolPlan) -> None:
        """A shard that has joined the pool since the last version."""
        for name in plan.shard_names():
            if self._version is not None and name not in self._told:
                self._start(name)

    def _start(self, name: str) -> None:
        self._told.add(name)
        if name not in self._sending:
            self._sending[name] = asyncio.create_task(self._send(name))

    async def _send(self, name: str) -> None:
        sent: int | None = None
        try:
            while self._version is not None and (sent != self._version or name in self._withdrawn):
                version, withdrawn = self._version, self._withdrawn.get(name)
                try:
                    serving = await self._shards.at(name).set_policy_version(version, withdrawn)
                    sent = version
                    if self._withdrawn.get(name) == withdrawn:
                        self._withdrawn.pop(name, None)
                    if name == self._shards.pool:
                        self._note_serving(serving)
                except PoolUnavailable:
                    await asyncio.sleep(RETRY_PAUSE)
        finally:
            del self._sending[name]
