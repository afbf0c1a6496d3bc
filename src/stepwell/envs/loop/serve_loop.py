"""ServeLoop: the shell around the pace. It reads the status, carries out the decision, and waits; again and again.

- Groups in progress continue whatever happens to the rollout server. While it does not answer, none is started.
- If the server does not know the environment any more when it returns, the environment registers again, gets another
  number, and continues; it keeps its own state.
- At the end, the groups in progress are delivered and a checkpoint is written.
"""

import asyncio
import logging
from dataclasses import replace
from functools import partial

from stepwell.envs.environment import Environment
from stepwell.envs.loop.group_tasks import GroupTasks, StopSignal, unless
from stepwell.envs.loop.pace import Decision, PaceTerms, Situation, decide, max_workers
from stepwell.envs.loop.progress import EnvProgress, ShowProgress
from stepwell.envs.rollout_server import RolloutServer
from stepwell.envs.scored_data import ScoredDataGroup
from stepwell.errors import BadRequest, RolloutServerAway, RolloutServerRefused, StepwellError
from stepwell.wire.scored_groups import EnvRegistered, EnvRegistration, EnvStatus

log = logging.getLogger("stepwell.envs")

LONGEST_PAUSE = 0.5
"""Seconds between two rounds if no group ends."""
SHORTEST_PAUSE = 0.05
"""Seconds between two rounds even if groups end."""
UNREACHABLE = "the rollout server is away"
STOPPED = "told to stop"


class Membership:
    """Made by `join`."""

    def __init__(self, env: Environment, server: RolloutServer, joined: EnvRegistered) -> None:
        self.joined = joined
        self._env, self._server = env, server
        self._is_unreachable = False

    async def status(self) -> EnvStatus | None:
        """The server's status; None while it does not answer."""
        try:
            status = await self._server.status(self.joined.env_id)
        except RolloutServerRefused as refused:
            log.warning("registering again: %s", refused)
            self.joined = await _register(self._env, self._server)
            return None
        except RolloutServerAway as away:
            if not self._is_unreachable:
                log.warning("no groups are started for now: %s", away)
            self._is_unreachable = True
            return None
        self._is_unreachable = False
        return status

    async def send(self, group: ScoredDataGroup) -> str:
        return await self._server.send(group, self.joined.env_id)

    async def leave(self) -> None:
        try:
            await self._server.disconnect(self.joined.env_id)
        except StepwellError as failure:
            log.warning("the rollout server was not told that the environment leaves: %s", failure)


async def join(env: Environment, server: RolloutServer) -> Membership:
    """Waits for the server and its trainer."""
    joined = await _register(env, server)
    log.info("registered as %s, at step %d", joined.wandb_name, joined.starting_step)
    return Membership(env, server, joined)


async def agree(env: Environment, server: RolloutServer, joined: EnvRegistered) -> tuple[PaceTerms, int | None]:
    """The terms of the run, and the longest sequence that the trainer accepts. BadRequest if they contradict the
    settings or are missing."""
    batch_size, max_token_len = await server.info()
    if batch_size == -1:
        batch_size = env.config.batch_size
    if env.config.group_size > batch_size:
        raise BadRequest(
            f"a group of {env.config.group_size} does not fit into the trainer's batch of {batch_size} sequences"
            if batch_size > 0
            else "neither the rollout server nor --env.batch-size says how many sequences a batch has"
        )
    total_steps = joined.num_steps if env.config.total_steps == -1 else env.config.total_steps
    if total_steps == -1:
        raise BadRequest("neither the rollout server nor --env.total-steps says how many steps there are")
    env.config.batch_size, env.config.total_steps = batch_size, total_steps
    workers = max_workers(env.config, len(env.server_configs))
    terms = PaceTerms(env.config, batch_size, workers, total_steps, joined.checkpoint_interval)
    return terms, max_token_len if max_token_len > 0 else None


async def _register(env: Environment, server: RolloutServer) -> EnvRegistered:
    return await server.register_env(
        EnvRegistration(
            max_token_length=env.config.max_token_length,
            desired_name=env.name,
            weight=env.config.inference_weight,
            min_batch_allocation=env.config.min_batch_allocation,
            group_size=env.config.group_size,
        )
    )


class ServeLoop:
    def __init__(
        self,
        env: Environment,
        membership: Membership,
        terms: PaceTerms,
        tasks: GroupTasks,
        show: ShowProgress,
        stop: StopSignal,
    ) -> None:
        self._env, self._membership, self._terms = env, membership, terms
        self._tasks, self._show, self._stop = tasks, show, stop
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
            self._show(self._progress(""))

    async def end(self) -> None:
        """Lets the groups in progress finish, unless the stop is immediate; then saves a checkpoint."""
        if self._stop.requested.is_set():
            self._save_checkpoint(self._env.curr_step)  # in case that there is no time for the last one
        await unless(self._stop.immediate, self._tasks.finish())
        await self._tasks.cancel()
        await self._end_evaluation()
        self._save_checkpoint(self._env.curr_step)
        self._show(self._progress(""))

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
        self._show(self._progress(decision.idle))
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
