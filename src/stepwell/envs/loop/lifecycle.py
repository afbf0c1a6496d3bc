"""An environment's lifecycle, from setup to close: serve a trainer, write a number of groups, or evaluate once."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from stepwell.envs.environment import Environment, claim
from stepwell.envs.loop.group_tasks import GroupTasks, StopSignal, stop_by_signal, unless
from stepwell.envs.loop.pace import max_workers
from stepwell.envs.loop.progress import GroupSink, ShowProgress
from stepwell.envs.loop.serve_loop import Membership, ServeLoop, agree, join
from stepwell.envs.rollout_server import RolloutServer
from stepwell.envs.scored_data import ScoredDataGroup

log = logging.getLogger("stepwell.envs")

TRIES = 10
"""Most groups that are begun for each wanted one; if all are dropped, the run ends."""
POLL = 0.1
"""Seconds between two checks."""


async def serve(env: Environment, show: ShowProgress = lambda progress: None) -> None:
    """Serves until the training is over, there are no more items, or a signal arrives."""
    rollout_server = RolloutServer(env.config.rollout_server_url, env.config.rollout_server_key)
    async with _set_up(env) as stop, rollout_server as server:
        membership = await unless(stop.requested, join(env, server))
        if membership is not None:
            await _serve(env, server, membership, show, stop)


async def process(env: Environment, groups: int, sink: GroupSink, show: ShowProgress = lambda progress: None) -> int:
    """Writes so many groups to `sink`, without a rollout server; returns how many were written."""
    env.process_mode = True
    async with _set_up(env) as stop:
        _start_tracking(env, job_type="process", name=env.name)
        return await ProcessLoop(env, groups, sink, show, stop).run()


async def evaluate(env: Environment) -> Mapping[str, float]:
    """Evaluates once, without a rollout server; returns the result of env.evaluate()."""
    async with _set_up(env) as stop:
        _start_tracking(env, job_type="evaluate", name=env.name)
        metrics = await unless(stop.requested, env.evaluate_to_end()) or {}
        if env.wandb.is_on:
            with env.failure_count.catching("wandb_log"):
                await env.wandb_log(metrics)
        return metrics


@asynccontextmanager
async def _set_up(env: Environment) -> AsyncIterator[StopSignal]:
    """Around a run: setup before it, close after it, and the signals that stop it."""
    with stop_by_signal() as stop:
        try:
            await env.setup()
            yield stop
        finally:
            await env.wandb.close()
            await env.close_servers()
            if env.checkpoints is not None:
                env.checkpoints.close()


async def _serve(
    env: Environment, server: RolloutServer, membership: Membership, show: ShowProgress, stop: StopSignal
) -> None:
    joined = membership.joined
    terms, max_length = await agree(env, server, joined)
    env.curr_step, env.wandb_prepend, env.env_id = joined.starting_step, joined.wandb_name, joined.env_id
    env.checkpoint_dir, env.checkpoint_interval = joined.checkpoint_dir, joined.checkpoint_interval
    env.max_token_len = -1 if max_length is None else max_length
    env.checkpoints = claim(joined.checkpoint_dir, joined.wandb_name, env.name, joined.starting_step)
    if joined.starting_step > 0:
        env.load_checkpoint()
    if env.config.use_wandb:
        env.wandb_project, env.wandb_group = await server.wandb_info()
        _start_tracking(env, name=joined.wandb_name, project=env.wandb_project, group=env.wandb_group)
    tasks = GroupTasks(env, membership.send, max_length=max_length)
    loop = ServeLoop(env, membership, terms, tasks, show, stop)
    try:
        log.info("the run has ended: %s", await loop.run())
    except asyncio.CancelledError:
        stop.stop_now()
        raise
    finally:
        await loop.end()
        await membership.leave()


def _start_tracking(env: Environment, **run: str | None) -> None:
    """`run` are arguments of wandb.init. Settings that the environment does not know may be secret and are left out."""
    if env.config.use_wandb:
        known = set(type(env.config).model_fields) - {"rollout_server_key"}
        env.wandb.start({**run, "config": env.config.model_dump(mode="json", include=known)})


class ProcessLoop:
    def __init__(self, env: Environment, groups: int, sink: GroupSink, show: ShowProgress, stop: StopSignal) -> None:
        self._env, self._wanted, self._sink, self._show, self._stop = env, groups, sink, show, stop
        self._tasks = GroupTasks(env, self._write)
        self._most = max_workers(env.config, len(env.server_configs))
        self._begun = 0

    async def run(self) -> int:
        """Returns how many were written."""
        while not self._is_over():
            self._start()
            self._show_progress()
            await unless(self._stop.requested, self._tasks.wait_for_change(POLL))
            await self._log()
        await unless(self._stop.immediate, self._tasks.finish())
        await self._tasks.cancel()
        await self._log()
        self._show_progress()
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

    def _show_progress(self) -> None:
        self._show(self._tasks.progress(self._env.groups_delivered, self._wanted))
