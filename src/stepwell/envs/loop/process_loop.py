"""Groups without a trainer: so many, written as they come."""

import logging

from stepwell.envs.base import BaseEnv
from stepwell.envs.loop.delivery import Delivery
from stepwell.envs.loop.group_tasks import Work
from stepwell.envs.loop.pace import max_workers
from stepwell.envs.loop.progress import Progress, Show, Sink
from stepwell.envs.loop.stop_signal import Stop, unless
from stepwell.envs.scored_data import ScoredDataGroup

log = logging.getLogger("stepwell.envs")

TRIES = 10
"""Groups that are begun for each one wanted, at most: where all are dropped, going on makes no sense."""
HELD = 0.1
"""Seconds between two looks."""


class Processing:
    def __init__(self, env: BaseEnv, groups: int, sink: Sink, show: Show, stop: Stop) -> None:
        self._env, self._wanted, self._sink, self._show, self._stop = env, groups, sink, show, stop
        self._work = Work(env, Delivery(env, self._write).deliver)
        self._most = max_workers(env.config, len(env.server_configs))
        self._begun = 0

    async def run(self) -> int:
        """How many were written."""
        while not self._is_over():
            self._start()
            self._show.update(self._progress())
            await unless(self._stop.asked, self._work.change(HELD))
        await unless(self._stop.hurried, self._work.finish())
        await self._work.cancel()
        self._show.update(self._progress())
        return self._env.tally.delivered

    def _is_over(self) -> bool:
        tally = self._env.tally
        tally.check()
        if self._stop.asked.is_set():
            return True
        if self._work.running:
            return False
        if tally.delivered < self._wanted and self._begun >= TRIES * self._wanted:
            log.warning("%d groups were begun for %d; dropped: %s", self._begun, self._wanted, dict(tally.dropped))
            return True
        return tally.delivered >= self._wanted or self._work.is_out_of_items

    def _start(self) -> None:
        missing = self._wanted - self._env.tally.delivered - self._work.running
        room = min(missing, self._most - self._work.running, TRIES * self._wanted - self._begun)
        if room > 0 and not self._env.tally.is_holding:
            self._begun += room
            self._work.start(room)

    async def _write(self, group: ScoredDataGroup) -> str:
        if self._env.tally.delivered >= self._wanted:
            return "there are enough"
        self._sink.write(group)
        return ""

    def _progress(self) -> Progress:
        return Progress(
            name=self._env.name,
            done=self._env.tally.delivered,
            total=self._wanted,
            delivered=self._env.tally.delivered,
            running=self._work.running,
            dropped=dict(self._env.tally.dropped),
        )
