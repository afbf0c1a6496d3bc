"""The groups under way: one task each, from the item to its delivery.

What always holds: a worker ends by itself, by delivering, by failing or by running out of time; only `cancel` ends it
otherwise, and then its item stands at the head of the backlog again. Whatever the environment's own code raises is
recorded and counted. get_next_item is never called twice at the same time.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from stepwell.envs.base import BaseEnv
from stepwell.envs.scored_data import Item, ScoredDataGroup

Deliver = Callable[[ScoredDataGroup], Awaitable[None]]

TIMED_OUT = "timed out"
NOTHING = "nothing collected"


class Work:
    def __init__(self, env: BaseEnv, deliver: Deliver) -> None:
        self._env = env
        self._deliver = deliver
        self._workers: dict[int, asyncio.Task[None]] = {}
        self._numbers = itertools.count()
        self._asking = asyncio.Lock()
        self._has_changed = asyncio.Event()
        self._had_none = False

    @property
    def running(self) -> int:
        return len(self._workers)

    @property
    def is_out_of_items(self) -> bool:
        return self._had_none and not self._env.backlog

    def start(self, count: int) -> None:
        """Begin so many groups; just one, to see, where there were no more items a moment ago."""
        for _ in range(min(count, 1) if self.is_out_of_items else count):
            number = next(self._numbers)
            worker = asyncio.create_task(self._work(number), name=f"group {number}")
            self._workers[number] = worker
            worker.add_done_callback(lambda _, number=number: self._end(number))  # type: ignore[misc]

    async def change(self, seconds: float) -> None:
        """Until an item is done with, if none was since this was last asked; or until so many seconds have passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._has_changed.wait()
        self._has_changed.clear()

    async def finish(self) -> None:
        """Until nothing is under way. Who still waits for an item is let go."""
        for number, worker in self._workers.items():
            if number not in self._env.under_way:
                worker.cancel()
        while self._workers:
            await asyncio.wait(self._workers.values())

    async def cancel(self) -> None:
        """End everything now, and put the items back."""
        self._env.backlog[:0] = self._env.under_way.values()
        self._env.under_way.clear()
        for worker in self._workers.values():
            worker.cancel()
        await asyncio.gather(*self._workers.values(), return_exceptions=True)

    def _end(self, number: int) -> None:
        del self._workers[number]
        if self._env.under_way.pop(number, None) is not None:
            self._has_changed.set()

    async def _work(self, number: int) -> None:
        began_at = self._env.tally.now()
        item: Item = None
        with self._env.tally.catching("get_next_item", began_at):
            item = await self._next_item()
        if item is None:
            return
        self._env.under_way[number] = item
        try:
            groups = await self._groups(item, began_at)
            with self._env.tally.catching("delivery", began_at):
                for group in groups:
                    await self._deliver(group)
        finally:
            with self._env.tally.catching("cleanup"):
                await self._env.cleanup()

    async def _next_item(self) -> Item:
        async with self._asking:
            if self._env.backlog:
                return self._env.backlog.pop(0)
            item = await self._env.get_next_item()
            self._had_none = item is None
            return item

    async def _groups(self, item: Item, began_at: float) -> Sequence[ScoredDataGroup]:
        limit = self._env.config.worker_timeout
        groups: list[ScoredDataGroup] = []
        with self._env.tally.catching("collect_trajectories", began_at):
            try:
                async with asyncio.timeout(limit if limit > 0 else None) as timer:
                    groups = await self._collected(item, began_at)
            except TimeoutError as late:
                if not timer.expired():
                    raise
                self._env.tally.fail(TIMED_OUT, late, began_at)
        return groups

    async def _collected(self, item: Item, began_at: float) -> list[ScoredDataGroup]:
        trajectories, backlog = await self._env.collect_trajectories(item)
        self._env.backlog.extend(backlog)
        if not _listed(trajectories):
            self._env.tally.drop(NOTHING)
            return []
        with self._env.tally.catching("postprocess_histories", began_at):
            groups = _listed(await self._env.postprocess_histories(trajectories))
            self._env.tally.succeed()
            if not groups:
                self._env.tally.drop(NOTHING)
            return groups
        return []


def _listed(groups: Any) -> list[Any]:
    if groups is None:
        return []
    return [group for group in groups if group is not None] if isinstance(groups, list) else [groups]
