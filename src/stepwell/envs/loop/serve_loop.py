"""The shell around the pace: looks how things are, does what was decided, waits a little; again and again.

What always holds: whatever becomes of the rollout server, work under way goes on; while it does not answer, none is
started. At the end what is under way is delivered, a checkpoint written and the environment disconnected.
"""

import asyncio
import logging

from stepwell.envs.base import BaseEnv
from stepwell.envs.loop.group_tasks import Work
from stepwell.envs.loop.membership import Membership
from stepwell.envs.loop.pace import Decision, Situation, Terms, decide
from stepwell.envs.loop.progress import Progress, Show
from stepwell.envs.loop.stop_signal import Stop, unless
from stepwell.envs.rollout_server.client import Status

log = logging.getLogger("stepwell.envs")

LOOKED = 0.5
"""Seconds between two looks, where nothing happens here."""
SETTLED = 0.05
"""Seconds between two looks, whatever happens here."""
AWAY = "the rollout server is away"
STOPPED = "told to stop"


class Serving:
    def __init__(self, env: BaseEnv, membership: Membership, terms: Terms, work: Work, show: Show, stop: Stop) -> None:
        self._env, self._membership, self._terms = env, membership, terms
        self._work, self._show, self._stop = work, show, stop
        self._evaluated_at = self._checkpointed_at = env.curr_step
        self._evaluation: asyncio.Task[None] | None = None
        self._queue: int | None = None
        self._delivered_at_log = 0

    async def run(self) -> str:
        """Until it is over; says why it is. EnvironmentFailed if the environment's code fails again and again."""
        try:
            while True:
                decision = await self._step()
                if decision.finished:
                    return decision.finished
                await self._settle()
        finally:
            self._show.update(self._progress(""))

    async def end(self) -> None:
        """Let what is under way finish, unless there is a hurry; keep what must be kept."""
        if self._stop.asked.is_set():
            self._save_checkpoint(self._env.curr_step)  # in case there is no time for more
        await unless(self._stop.hurried, self._work.finish())
        await self._work.cancel()
        await self._end_evaluation()
        self._save_checkpoint(self._env.curr_step)
        self._show.update(self._progress(""))

    async def _step(self) -> Decision:
        status = await unless(self._stop.asked, self._membership.look())
        self._env.tally.check()
        if status is None:
            decision = Decision(idle=AWAY, finished=STOPPED if self._stop.asked.is_set() else "")
        else:
            decision = decide(self._terms, self._situation(status))
            await self._act(status, decision)
        self._show.update(self._progress(decision.idle))
        return decision

    def _situation(self, status: Status) -> Situation:
        self._evaluated_at = min(self._evaluated_at, status.current_step)
        self._checkpointed_at = min(self._checkpointed_at, status.current_step)
        return Situation(
            step=status.current_step,
            queue_size=status.queue_size,
            self_queue_size=status.self_queue_size,
            unallocated_fraction=status.unallocated_fraction,
            running=self._work.running,
            evaluated_at=self._evaluated_at,
            checkpointed_at=self._checkpointed_at,
            is_evaluating=self._is_evaluating,
            is_stopping=self._stop.asked.is_set(),
            is_out_of_items=self._work.is_out_of_items,
            is_holding=self._env.tally.is_holding,
        )

    async def _act(self, status: Status, decision: Decision) -> None:
        is_new_step = status.current_step != self._env.curr_step
        self._env.curr_step, self._queue = status.current_step, status.queue_size
        self._env.server.update_weight(status.env_weight)
        if decision.checkpoint is not None:
            self._checkpointed_at = decision.checkpoint
            self._save_checkpoint(decision.checkpoint)
        if decision.evaluate:
            self._evaluated_at = status.current_step
            self._evaluation = asyncio.create_task(self._evaluate(), name="evaluation")
        self._work.start(decision.start)
        if is_new_step:
            await self._log()

    async def _settle(self) -> None:
        """Until a worker has ended, or for a while."""
        await unless(self._stop.asked, asyncio.sleep(SETTLED))
        await unless(self._stop.asked, self._work.change(LOOKED))

    # -- evaluations, checkpoints, logs --------------------------------------------------------------------------------

    @property
    def _is_evaluating(self) -> bool:
        return self._evaluation is not None and not self._evaluation.done()

    async def _evaluate(self) -> None:
        with self._env.tally.catching("evaluate"):
            metrics = await self._env.evaluate()
            log.info("evaluation at step %d: %s", self._evaluated_at, metrics)
            await self._env.wandb_log(metrics)

    async def _end_evaluation(self) -> None:
        """One that runs is waited for, unless a signal ended the work."""
        if self._evaluation is not None:
            await unless(self._stop.asked, asyncio.shield(self._evaluation))
            self._evaluation.cancel()
            await asyncio.gather(self._evaluation, return_exceptions=True)

    def _save_checkpoint(self, step: int) -> None:
        with self._env.tally.catching("save_checkpoint"):
            self._env.save_checkpoint(step)

    async def _log(self) -> None:
        if self._env.tally.delivered - self._delivered_at_log >= self._env.config.min_items_sent_before_logging:
            self._delivered_at_log = self._env.tally.delivered
            with self._env.tally.catching("wandb_log"):
                await self._env.wandb_log()

    def _progress(self, idle: str) -> Progress:
        return Progress(
            name=self._env.name,
            done=self._env.curr_step,
            total=self._terms.total_steps,
            delivered=self._env.tally.delivered,
            running=self._work.running,
            queue=self._queue,
            idle=idle,
            is_evaluating=self._is_evaluating,
            dropped=dict(self._env.tally.dropped),
        )
