"""AsyncRollouter: keeps groups of rollouts going, within the pool's pacing, until told to stop.

    flow = BlackBoxAgentFlow(url, agent, group_size=8)
    await AsyncRollouter(flow, Dataset("train.jsonl"), gateway=url).run()

A shell around the plan: it asks the gateway how the pool is, starts what the plan says, and tells it what came of it.
What always holds: a rollout that fails is a result, not a crash; a gateway that is away is waited for; when `run` ends,
however it ends, no rollout is left running, and what was unfinished is aborted in the pool; a group that is given up
leaves nothing there.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from stepwell.agents.dataset import Dataset
from stepwell.agents.flow import AgentFlow
from stepwell.agents.gateway_client import GatewayClient
from stepwell.agents.gateway_process import GatewayProcess
from stepwell.agents.rollout import RolloutResult
from stepwell.agents.rollout_counts import RolloutCounts
from stepwell.agents.schedule import GroupEnd, RolloutSchedule, Sizes, Start, StartPace
from stepwell.agents.validation import Rhythm, Round, Validation, ValidationReport
from stepwell.common.progress import ProgressLine
from stepwell.errors import BadRequest, StepwellError
from stepwell.logs import about

log = logging.getLogger("stepwell.agents")

PACE_EVERY = 0.1
"""Seconds between two questions for the pool's pacing."""
VERSION_EVERY = 0.5
"""Seconds between two questions for the policy version, where someone validates."""


class AsyncRollouter:
    def __init__(
        self,
        flow: AgentFlow,
        dataset: Dataset,
        *,
        gateway: str | GatewayProcess,
        concurrency: int = 64,
        retries: int = 3,
        validation: Validation | None = None,
        on_result: Callable[[RolloutResult], None] = lambda result: None,
        on_validation: Callable[[ValidationReport], None] = lambda report: None,
    ) -> None:
        """A GatewayProcess is started and kept up; a URL is that of a gateway that runs already."""
        if validation is not None and validation.flow.channel == flow.channel:
            raise BadRequest(f"validation and training are both on channel {flow.channel!r}: give them one each")
        self.tally = RolloutCounts()
        self._flow = flow
        self._dataset = dataset
        self._gateway = gateway
        self._concurrency = concurrency
        self._retries = retries
        self._validation = validation
        self._rhythm = Rhythm(validation.every) if validation else None
        self._round: Round | None = None
        self._on_result = on_result
        self._on_validation = on_validation
        self._plan: RolloutSchedule | None = None
        self._tasks: dict[Start, asyncio.Task[None]] = {}
        self._completed: dict[str, list[RolloutResult]] = {}
        """The rollouts of open groups that are complete, by prompt_uid."""
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Open no more groups; `run` returns once those that are open have come to their end."""
        if self._plan is not None:
            self._plan.stop()
            self._changed.set()

    async def run(self, groups: int | None = None) -> RolloutCounts:
        """Make so many groups, or without end, or to the dataset's."""
        plan = self._plan = self._new_plan(groups)
        started = time.monotonic()
        progress = ProgressLine(lambda: self.tally.line(plan.running, time.monotonic() - started))
        async with self._open() as link, asyncio.TaskGroup() as tasks:
            others = [
                tasks.create_task(self._follow(link, plan)),
                tasks.create_task(progress.run()),
            ]
            while not plan.is_over:
                for start in plan.next_starts():
                    self._tasks[start] = task = tasks.create_task(self._roll(plan, start))
                    task.add_done_callback(partial(self._leave, plan, start))
                self._changed.clear()
                await self._changed.wait()
            for task in others:
                task.cancel()
        return self.tally

    def _new_plan(self, groups: int | None) -> RolloutSchedule:
        bounds = [bound for bound in (groups, self._dataset.left) if bound is not None]
        sizes = Sizes(self._flow.group_size, self._validation.flow.group_size if self._validation else 0)
        return RolloutSchedule(
            iter(self._dataset),
            self._dataset.find,
            sizes,
            concurrency=self._concurrency,
            retries=self._retries,
            groups=min(bounds, default=None),
        )

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[GatewayClient]:
        async with AsyncExitStack() as stack:
            url = self._gateway if isinstance(self._gateway, str) else self._gateway.url
            if isinstance(self._gateway, GatewayProcess):
                await stack.enter_async_context(self._gateway)
            await stack.enter_async_context(self._flow)
            if self._validation is not None:
                await stack.enter_async_context(self._validation.flow)
            yield await stack.enter_async_context(GatewayClient(url, self._flow.link.key))

    # -- what the pool says --------------------------------------------------------------------------------------------

    async def _follow(self, link: GatewayClient, plan: RolloutSchedule) -> None:
        trouble, version_at = "", 0.0
        while True:
            plan.ask()
            try:
                now = await link.pacing(self._flow.channel)
                plan.answer(StartPace(now.may_start, [(refill.prompt_uid, refill.missing) for refill in now.refills]))
                if self._rhythm is not None and time.monotonic() > version_at + VERSION_EVERY:
                    version_at = time.monotonic()
                    self._validate_if_due(plan, self._rhythm, await link.policy_version())
                trouble = ""
            except StepwellError as failure:
                plan.answer(None)
                if str(failure) != trouble:
                    trouble = str(failure)
                    log.warning("nothing is started for now: %s", trouble)
            self._changed.set()
            await asyncio.sleep(PACE_EVERY)

    def _validate_if_due(self, plan: RolloutSchedule, rhythm: Rhythm, version: int | None) -> None:
        if self._validation is None or plan.is_validating or plan.is_stopping or not rhythm.is_due(version):
            return
        rhythm.begin(version)
        self._round = Round(version)
        plan.validate(self._validation.dataset.rest_of_epoch())

    # -- one rollout ---------------------------------------------------------------------------------------------------

    async def _roll(self, plan: RolloutSchedule, start: Start) -> None:
        flow = self._validation.flow if start.is_validation and self._validation else self._flow
        result = await flow.rollout(
            start.prompt.sample, start.prompt.uid, attempt=start.attempt, on_open=lambda: plan.opened(start)
        )
        self._note(start, result)
        if (end := plan.ended(start, result.status)) is not None:
            self._note_end(plan, end, result)
            completed = self._completed.pop(end.prompt.uid, [])
            if end.is_given_up:
                await self._take_back(flow, completed)

    async def _take_back(self, flow: AgentFlow, completed: Sequence[RolloutResult]) -> None:
        """What is left of a group that will not be complete: it would count as waiting for the trainer for ever."""
        try:
            for done in completed:
                await flow.take_back(done, "its group was given up")
        except StepwellError as failure:
            log.warning("rollouts of a group that was given up stay in the pool: %s", failure)

    def _leave(self, plan: RolloutSchedule, start: Start, task: asyncio.Task[None]) -> None:
        """However it ended: one that was cancelled may never have begun."""
        del self._tasks[start]
        plan.ended(start, None)
        self._changed.set()

    def _note(self, start: Start, result: RolloutResult) -> None:
        self.tally.add(result, is_validation=start.is_validation)
        if result.is_completed:
            self._completed.setdefault(start.prompt.uid, []).append(result)
        else:
            names = about(trajectory_uid=result.trajectory_uid, prompt_uid=result.prompt_uid, attempt=result.attempt)
            log.info("a rollout was not completed: %s, %s", result.status, result.why, extra=names)
        if start.is_validation and self._round is not None:
            self._round.add(result)
        self._on_result(result)

    def _note_end(self, plan: RolloutSchedule, end: GroupEnd, last: RolloutResult) -> None:
        for start in end.to_cancel:
            self._tasks[start].cancel()
        if end.is_given_up:
            self.tally.given_up += 1
            log.warning(
                "group %s is given up: a rollout failed %d times, last because: %s; %d complete ones are taken back",
                *(end.prompt.uid, last.attempt + 1, last.why or last.status, end.completed),
            )
        elif not end.is_validation:
            self.tally.groups += 1
        if end.is_validation and not plan.is_validating and self._round is not None:
            self._report(self._round)

    def _report(self, done: Round) -> None:
        report, self._round = done.report(), None
        log.info("validation at policy version %s: mean reward %s", report.policy_version, report.mean_reward)
        self._on_validation(report)
