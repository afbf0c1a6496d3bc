"""GroupTasks: the groups in progress, one task each, from the item to its delivery.

- A task ends by itself: it delivers, fails or times out. Only `cancel` ends it earlier; its item then returns to the
  head of the backlog.
- Whatever the environment's code raises is logged and counted.
- A finished group is delivered, or it is dropped and counted under its cause.
- get_next_item is never called concurrently.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from stepwell.envs.environment import Environment
from stepwell.envs.loop.progress import EnvProgress
from stepwell.envs.scored_data import (
    MALFORMED,
    UNTRAINED,
    Groups,
    Item,
    ScoredDataGroup,
    append_group,
    as_list,
    group_fault,
    without_empty_lists,
)
from stepwell.envs.servers.sequences import add_temperatures, noting_sampling

Send: TypeAlias = Callable[[ScoredDataGroup], Awaitable[str]]
"""Returns an empty text if the group has arrived, else the reason why not."""

TIMED_OUT = "timed out"
NOTHING = "nothing collected"
NOT_SENT = "not sent"


class GroupTasks:
    def __init__(self, env: Environment, send: Send, *, max_length: int | None = None) -> None:
        """`max_length`: the most tokens that the trainer accepts."""
        self._env = env
        self._send = send
        self._max_length = max_length
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._numbers = itertools.count()
        self._item_lock = asyncio.Lock()
        self._file_lock = asyncio.Lock()
        self._has_changed = asyncio.Event()
        self._last_item_was_none = False
        self._has_ended = False
        env.deliver, env.roll_out = self._deliver, self._roll_out

    @property
    def running(self) -> int:
        return len(self._tasks)

    @property
    def is_out_of_items(self) -> bool:
        """Whether there was no item a moment ago; there may be some later."""
        return self._last_item_was_none and not self._env.backlog

    @property
    def has_ended(self) -> bool:
        """Whether there will be no more items."""
        return self._has_ended and not self._env.backlog

    def start(self, count: int) -> None:
        """Begins so many groups; only one, as a test, if there was no item a moment ago."""
        for _ in range(0 if self.has_ended else min(count, 1) if self.is_out_of_items else count):
            number = next(self._numbers)
            task = asyncio.create_task(self._run(number), name=f"group {number}")
            self._tasks[number] = task
            task.add_done_callback(lambda _, number=number: self._remove(number))  # type: ignore[misc]

    def progress(self, done: int, total: int) -> EnvProgress:
        return EnvProgress(
            name=self._env.name,
            done=done,
            total=total,
            delivered=self._env.groups_delivered,
            running=self.running,
            dropped=dict(self._env.failure_count.dropped),
        )

    async def wait_for_change(self, seconds: float) -> None:
        """Waits until an item is finished, at most so many seconds; returns at once if one was finished since the last
        call."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._has_changed.wait()
        self._has_changed.clear()

    async def finish(self) -> None:
        """Waits until nothing is in progress. Tasks that still wait for an item are cancelled."""
        for number, task in self._tasks.items():
            if number not in self._env.items_in_progress:
                task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def cancel(self) -> None:
        """Ends everything now, and returns the items to the backlog."""
        self._env.backlog[:0] = self._env.items_in_progress.values()
        self._env.items_in_progress.clear()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _remove(self, number: int) -> None:
        del self._tasks[number]
        if self._env.items_in_progress.pop(number, None) is not None:
            self._has_changed.set()

    async def _run(self, number: int) -> None:
        began_at = self._env.failure_count.now()
        item: Item = None
        with self._env.failure_count.catching("get_next_item", began_at):
            item = await self._next_item()
        if item is None:
            return
        self._env.items_in_progress[number] = item
        try:
            with noting_sampling(), self._env.failure_count.catching("handle_env", began_at):
                await self._env.handle_env(str(number))
        finally:
            with self._env.failure_count.catching("cleanup"):
                await self._env.cleanup()

    async def _roll_out(self, item_uuid: str) -> Groups:
        item, began_at = self._env.items_in_progress[int(item_uuid)], self._env.failure_count.now()
        groups = await self._groups(item, began_at)
        self._note_duration(self._env.failure_count.now() - began_at, has_succeeded=groups is not None)
        if groups is not None:
            with self._env.failure_count.catching("delivery", began_at):
                await self._env.handle_send_to_api(groups, item)
        return groups

    async def _next_item(self) -> Item:
        async with self._item_lock:
            if self._env.backlog:
                return self._env.backlog.pop(0)
            try:
                item = await self._env.get_next_item()
            except StopAsyncIteration:
                item, self._has_ended = None, True
            self._last_item_was_none = item is None
            return item

    def _note_duration(self, seconds: float, *, has_succeeded: bool) -> None:
        self._env.task_duration.append(seconds)
        (self._env.succeeded_task_duration if has_succeeded else self._env.failed_task_duration).append(seconds)

    async def _groups(self, item: Item, began_at: float) -> Groups:
        """The groups as the environment returned them, one or several; None if there is none."""
        limit = self._env.config.worker_timeout
        groups: Groups = None
        with self._env.failure_count.catching("collect_trajectories", began_at):
            try:
                async with asyncio.timeout(limit if limit > 0 else None) as timer:
                    groups = await self._collect(item, began_at)
            except TimeoutError as late:
                if not timer.expired():
                    raise
                self._env.failure_count.fail(TIMED_OUT, late, began_at)
        return groups

    async def _collect(self, item: Item, began_at: float) -> Groups:
        trajectories, backlog = await self._env.collect_trajectories(item)
        self._env.backlog.extend(backlog)
        if not as_list(trajectories):
            self._env.failure_count.drop(NOTHING)
            return None
        with self._env.failure_count.catching("postprocess_histories", began_at):
            groups = await self._env.postprocess_histories(trajectories)
            self._env.failure_count.succeed()
            if as_list(groups):
                return groups
            self._env.failure_count.drop(NOTHING)
        return None

    async def _deliver(self, group: ScoredDataGroup, item: Item, is_sent: bool, has_max_length: bool) -> None:
        env, config = self._env, self._env.config
        if not isinstance(group, dict):
            env.failure_count.drop(MALFORMED, f"it is a {type(group).__name__} and no dictionary")
            return
        without_empty_lists(group)
        fault = group_fault(
            group,
            group_size=config.group_size,
            max_length=self._max_length if has_max_length else None,
            may_be_equal=not config.ensure_scores_are_not_same,
        )
        if fault is not None:
            env.failure_count.drop(*fault)
            return
        if config.include_messages and not group.get("messages"):
            group["messages"] = [[{"role": "user", "content": str(env.tokenizer.decode(t))}] for t in group["tokens"]]
        add_temperatures(group)
        env.completion_lengths += [len(mask) - list(mask).count(UNTRAINED) for mask in group["masks"]]
        with env.failure_count.catching("add_rollouts_for_wandb"):
            await env.add_rollouts_for_wandb(group, item)
        if config.data_path_to_save_groups is not None:
            async with self._file_lock:
                await asyncio.to_thread(append_group, Path(config.data_path_to_save_groups), group)
        if is_sent and await self._send(group):
            env.failure_count.drop(NOT_SENT)
        else:
            env.groups_delivered += is_sent
