"""ProcessLoop: makes a number of groups and writes them, without a trainer."""

import logging

from stepwell.envs.environment import Environment
from stepwell.envs.loop.group_tasks import GroupTasks, StopSignal, unless
from stepwell.envs.loop.pace import max_workers
from stepwell.envs.loop.progress import GroupSink, ProgressView
from stepwell.envs.scored_data import ScoredDataGroup

log = logging.getLogger("stepwell.envs")

TRIES = 10
"""Most groups that are begun for each wanted one; if all are dropped, the run ends."""
POLL = 0.1
"""Seconds between two checks."""


class ProcessLoop:
    def __init__(self, env: Environment, groups: int, sink: GroupSink, view: ProgressView, stop: StopSignal) -> None:
        self._env, self._wanted, self._sink, self._view, self._stop = env, groups, sink, view, stop
        self._tasks = GroupTasks(env, self._write)
        self._most = max_workers(env.config, len(env.server_configs))
        self._begun = 0

    async def run(self) -> int:
        """Returns how many were written."""
        while not self._is_over():
            self._start()
            self._show()
            await unless(self._stop.requested, self._tasks.wait_for_change(POLL))
            await self._log()
        await unless(self._stop.immediate, self._tasks.finish())
        await self._tasks.cancel()
        await self._log()
        self._show()
        return self._env.groups_delivered

    def _is_over(self) -> bool:
        failures, written = self._env.failure_count, self._env.groups_delivered
        failures.check()
        if self._stop.requested.is_set():
            return True
        if self._tasks.running:
            return False
        if written < self._wanted and self._begun >= TRIES * self._wanted:
            log.warning("%d groups were begun for %d; dropped: %s", self._begun, self._wanted, dict(failures.dropped))
            return True
        return written >= self._wanted or self._tasks.is_out_of_items

    def _start(self) -> None:
        missing = self._wanted - self._env.groups_delivered - self._tasks.running
        room = min(missing, self._most - self._tasks.running, TRIES * self._wanted - self._begun)
        if room > 0 and not self._env.failure_count.is_pausing:
            self._begun += room
            self._tasks.start(room)

    async def _write(self, group: ScoredDataGroup) -> str:
        if self._env.groups_delivered >= self._wanted:
            return "there are enough"
        self._sink.write(group)
        return ""

    async def _log(self) -> None:
        """Calls wandb_log after each written group, once for groups that end together; their number is the step."""
        if self._env.curr_step < self._env.groups_delivered:
            self._env.curr_step = self._env.groups_delivered
            with self._env.failure_count.catching("wandb_log"):
                await self._env.wandb_log()

    def _show(self) -> None:
        self._view.update(self._tasks.progress(self._env.groups_delivered, self._wanted))
