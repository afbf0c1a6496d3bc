"""ServeLoop: the shell around the pace. It reads the status, carries out the decision, and waits; again and again.

- Groups in progress continue whatever happens to the rollout server. While it does not answer, none is started.
- At the end, the groups in progress are delivered and a checkpoint is written.
"""

import asyncio
import logging
from dataclasses import replace
from functools import partial

from stepwell.envs.environment import Environment
from stepwell.envs.loop.group_tasks import GroupTasks, StopSignal, unless
from stepwell.envs.loop.pace import Decision, PaceTerms, Situation, decide
from stepwell.envs.loop.progress import EnvProgress, ProgressView
from stepwell.wire.scored_groups import EnvStatus

log = logging.getLogger("stepwell.envs")

LONGEST_PAUSE = 0.5
"""Seconds between two rounds if no group ends."""
SHORTEST_PAUSE = 0.05
"""Seconds between two rounds even if groups end."""
UNREACHABLE = "the rollout server is away"
STOPPED = "told to stop"


class ServeLoop:
    def __init__(
        self,
        env: Environment,
        membership: Membership,
        terms: PaceTerms,
        tasks: GroupTasks,
        view: ProgressView,
        stop: StopSignal,
    ) -> None:
        self._env, self._membership, self._terms = env, membership, terms
        self._tasks, self._view, self._stop = tasks, view, stop
        self._evaluated_at = self._checkpointed_at = env.curr_step
        self._evaluation: asyncio.Task[None] | None = None
        self._queue: int | None = None
        self._delivered_at_log = 0
        self._idle = ""
        self._pauses = 0
        self._round_at: float | None = None

    async def run(self) -> str:
        """Runs until the run is over; returns why. EnvironmentFailed if the environment's code fails too often."""
        try:
            while True:
                decision = await self._round()
                if decision.finished:
                    return decision.finished
                await self._pause()
        finally:
            self._view.update(self._progress(""))

    async def end(self) -> None:
        """Lets the groups in progress finish, unless the stop is immediate; then saves a checkpoint."""
        if self._stop.requested.is_set():
            self._save_checkpoint(self._env.curr_step)  # in case that there is no time for the last one
        await unless(self._stop.immediate, self._tasks.finish())
        await self._tasks.cancel()
        await self._end_evaluation()
        self._save_checkpoint(self._env.curr_step)
        self._view.update(self._progress(""))

    async def _round(self) -> Decision:
        now = self._env.failure_count.now()
        if self._round_at is not None:
            self._env.mainloop_timings.append(now - self._round_at)
        self._round_at = now
        before = (self._env.curr_step, self._queue, bool(self._idle))
        status = await unless(self._stop.requested, self._membership.status())
        self._env.failure_count.check()
        if status is None:
            decision = Decision(idle=UNREACHABLE, finished=STOPPED if self._stop.requested.is_set() else "")
        else:
            decision = decide(self._terms, self._situation(status))
            await self._act(status, decision)
        if decision.idle != self._idle:
            log.info("paused: %s" if decision.idle else "resumed%s", decision.idle)
            self._pauses += not self._idle
            self._idle = decision.idle
        if (self._env.curr_step, self._queue, bool(self._idle)) != before:
            self._log_pace()
        self._view.update(self._progress(decision.idle))
        return decision

    def _situation(self, status: EnvStatus) -> Situation:
        self._evaluated_at = min(self._evaluated_at, status.current_step)
        self._checkpointed_at = min(self._checkpointed_at, status.current_step)
        return Situation(
            status=status,
            running=self._tasks.running,
            evaluated_at=self._evaluated_at,
            checkpointed_at=self._checkpointed_at,
            is_evaluating=self._is_evaluating,
            is_stopping=self._stop.requested.is_set(),
            has_ended=self._tasks.has_ended,
            is_pausing=self._env.failure_count.is_pausing,
        )

    async def _act(self, status: EnvStatus, decision: Decision) -> None:
        self._env.status_dict = status.model_dump()
        with self._env.failure_count.catching("env_step_checks"):
            await self._env.env_step_checks()
        is_new_step = status.current_step != self._env.curr_step
        self._env.curr_step, self._queue = status.current_step, status.queue_size
        self._env.server.update_weight(status.env_weight)
        if decision.checkpoint is not None:
            self._checkpointed_at = decision.checkpoint
            self._save_checkpoint(decision.checkpoint)
        if decision.evaluate:
            self._evaluated_at = status.current_step
            self._evaluation = asyncio.create_task(self._evaluate(), name="evaluation")
        self._env.workers_added_list.append(decision.start)
        self._env.start_groups = partial(self._tasks.start, decision.start)
        with self._env.failure_count.catching("add_train_workers"):
            await self._env.add_train_workers()
        if is_new_step:
            await self._log()

    async def _pause(self) -> None:
        """Waits until a group has ended, within the two limits."""
        await unless(self._stop.requested, asyncio.sleep(SHORTEST_PAUSE))
        await unless(self._stop.requested, self._tasks.wait_for_change(LONGEST_PAUSE))

    # -- evaluations, checkpoints, logs --------------------------------------------------------------------------------

    @property
    def _is_evaluating(self) -> bool:
        return self._evaluation is not None and not self._evaluation.done()

    async def _evaluate(self) -> None:
        with self._env.failure_count.catching("evaluate"):
            metrics = await self._env.evaluate_to_end()
            log.info("evaluation at step %d: %s", self._evaluated_at, metrics)
            await self._env.wandb_log(metrics)

    async def _end_evaluation(self) -> None:
        """Waits for a running evaluation, unless a signal ended the run."""
        if self._evaluation is not None:
            await unless(self._stop.requested, asyncio.shield(self._evaluation))
            self._evaluation.cancel()
            await asyncio.gather(self._evaluation, return_exceptions=True)

    def _save_checkpoint(self, step: int) -> None:
        with self._env.failure_count.catching("save_checkpoint"):
            self._env.save_checkpoint(step)

    async def _log(self) -> None:
        if self._env.groups_delivered - self._delivered_at_log >= self._env.config.min_items_sent_before_logging:
            self._delivered_at_log = self._env.groups_delivered
            with self._env.failure_count.catching("wandb_log"):
                await self._env.wandb_log()

    def _log_pace(self) -> None:
        """Called at each pause, resume, new step and new size of the queue. W&B keeps one row for each step, so the
        counts are what tells of a pause that begins and ends within a step."""
        is_paused = bool(self._idle)
        pace = {"paused": int(is_paused), "pauses": self._pauses, "resumes": self._pauses - is_paused}
        queue = {} if self._queue is None else {"queue_size": self._queue}
        self._env.log_to_wandb({f"pace/{name}": value for name, value in (pace | queue).items()})

    def _progress(self, idle: str) -> EnvProgress:
        progress = self._tasks.progress(self._env.curr_step, self._terms.total_steps)
        return replace(progress, queue=self._queue, idle=idle, is_evaluating=self._is_evaluating)
