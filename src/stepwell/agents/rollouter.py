"""AsyncRollouter: runs groups of rollouts, within the pool's pacing, until it is stopped.

    flow = BlackBoxAgentFlow(url, agent, group_size=8)
    await AsyncRollouter(flow, Dataset("train.jsonl"), gateway=url).run()

The schedule decides (schedule.py); the rollouter asks the gateway for the pacing, starts rollouts and reports results.

- A rollout that fails is a result, not an exception. A gateway that is unavailable is waited for.
- When `run` ends, in whatever way, no rollout is running, and unfinished ones are aborted in the pool.
- A group that is given up leaves nothing in the pool.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from stepwell.agents.dataset import Dataset
from stepwell.agents.gateway_client import GatewayClient
from stepwell.agents.gateway_process import GatewayProcess
from stepwell.agents.rollout import ALARM_AMONG, AgentFlow, RolloutCounts, RolloutResult
from stepwell.agents.schedule import RolloutSchedule, RolloutStart, ScheduledGroup
from stepwell.agents.validation import Validation, ValidationReport, ValidationRound
from stepwell.common.command_line import ProgressLine
from stepwell.errors import BadRequest, StepwellError
from stepwell.logs import about

log = logging.getLogger("stepwell.agents")

PACE_EVERY = 0.1
"""Seconds between two requests for the pool's pacing."""
SAY_WAITING_EVERY = 30.0
"""Seconds without a start after which the reason is logged, again and again."""
ALARM = (
    "%s ended more than a tenth of the last %d rollouts, the last one because: %s. If the machine or a service causes "
    "it, mend that, and name the exception in retry_on= so that its rollouts are not trained; if the model causes it, "
    "let the agent raise AgentFailed; see docs/agents.md"
)
VERSION_EVERY = 0.5
"""Seconds between two requests for the policy version, if there is validation."""


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
        """`gateway`: a GatewayProcess, which is started and supervised, or the URL of a running gateway."""
        if validation is not None and validation.flow.channel == flow.channel:
            raise BadRequest(f"validation and training are both on channel {flow.channel!r}: give each its own")
        self.counts = RolloutCounts()
        self._flow = flow
        self._dataset = dataset
        self._gateway = gateway
        self._concurrency = concurrency
        self._retries = retries
        self._validation = validation
        self._next_validation: int | None = None
        """The policy version at which to validate; None before the first validation."""
        self._round: ValidationRound | None = None
        self._on_result = on_result
        self._on_validation = on_validation
        self._schedule: RolloutSchedule | None = None
        self._tasks: dict[RolloutStart, asyncio.Task[None]] = {}
        self._completed: dict[str, list[RolloutResult]] = {}
        """The completed rollouts of open groups, by prompt_uid."""
        self._alarms = {""}
        """Types of exceptions that were said to be frequent."""
        self._refusal = ""
        """Why the run cannot begin with these settings."""
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Open no more groups; `run` returns when the open ones have ended."""
        if self._schedule is not None:
            self._schedule.stop()
            self._changed.set()

    async def run(self, groups: int | None = None) -> RolloutCounts:
        """Make that many groups, or as many as the dataset has. Without both limits it runs until stopped."""
        schedule = self._schedule = self._new_schedule(groups)
        started = time.monotonic()
        progress = ProgressLine(lambda: self.counts.line(schedule.running, time.monotonic() - started))
        async with self._open() as gateway, asyncio.TaskGroup() as tasks:
            others = [
                tasks.create_task(self._follow_pacing(gateway, schedule)),
                tasks.create_task(progress.run()),
            ]
            while not schedule.is_over:
                for start in schedule.next_starts():
                    self._tasks[start] = task = tasks.create_task(self._run_rollout(schedule, start))
                    task.add_done_callback(partial(self._remove_task, schedule, start))
                self._changed.clear()
                await self._changed.wait()
            for task in others:
                task.cancel()
        if self._refusal:
            raise BadRequest(self._refusal)
        return self.counts

    def _new_schedule(self, groups: int | None) -> RolloutSchedule:
        bounds = [bound for bound in (groups, self._dataset.left) if bound is not None]
        return RolloutSchedule(
            iter(self._dataset),
            self._dataset.find,
            group_size=self._flow.group_size,
            validation_size=self._validation.flow.group_size if self._validation else 0,
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
            yield await stack.enter_async_context(GatewayClient(url, self._flow.gateway.key))

    # -- pacing --------------------------------------------------------------------------------------------------------

    async def _follow_pacing(self, gateway: GatewayClient, schedule: RolloutSchedule) -> None:
        trouble, version_at, said_at = "", 0.0, time.monotonic()
        while True:
            schedule.pacing_requested()
            try:
                pace = await gateway.pacing(self._flow.channel)
                if self._refuse_timeouts(pace.group_deadline):
                    return self.stop()
                schedule.pacing_received(pace)
                if not pace.waits_for:
                    said_at = time.monotonic()
                elif time.monotonic() > said_at + SAY_WAITING_EVERY:
                    said_at = time.monotonic()
                    log.info("no rollouts are started for now: %s", pace.waits_for)
                if self._validation is not None and time.monotonic() > version_at + VERSION_EVERY:
                    version_at = time.monotonic()
                    self._validate_if_due(schedule, self._validation, await gateway.policy_version())
                trouble = ""
            except StepwellError as failure:
                schedule.pacing_received(None)
                if str(failure) != trouble:
                    trouble = str(failure)
                    log.warning("no rollouts are started for now: %s", trouble)
            self._changed.set()
            await asyncio.sleep(PACE_EVERY)

    def _refuse_timeouts(self, deadline: float | None) -> str:
        """Why a flow's timeout does not fit the pool's deadline; empty if all fit."""
        flows = [self._flow, *([self._validation.flow] if self._validation else [])]
        longest = max(flow.timeout for flow in flows)
        if deadline is not None and longest >= deadline:
            self._refusal = (
                f"a rollout may take {longest:g} s (timeout=), and the pool ends every group after {deadline:g} s "
                "(--group-deadline), as if the rollouts that still run had failed: give the flow a shorter timeout, or "
                "the pool a longer deadline"
            )
        return self._refusal

    def _validate_if_due(self, schedule: RolloutSchedule, validation: Validation, version: int | None) -> None:
        """Validates at the start, then each time the version has grown by `every`. An unknown version counts as 0: the
        weights that an engine starts with have no number."""
        number = version or 0
        is_due = self._next_validation is None or number >= self._next_validation
        if is_due and not schedule.is_validating and not schedule.is_stopping:
            self._next_validation = number + validation.every
            self._round = ValidationRound(version)
            schedule.validate(validation.dataset.rest_of_epoch())

    # -- one rollout ---------------------------------------------------------------------------------------------------

    async def _run_rollout(self, schedule: RolloutSchedule, start: RolloutStart) -> None:
        flow = self._validation.flow if start.is_validation and self._validation else self._flow
        result = await flow.rollout(
            start.prompt.sample, start.prompt.uid, attempt=start.attempt, on_open=lambda: schedule.opened(start)
        )
        self._note(start, result)
        if (end := schedule.ended(start, result.status)) is not None:
            self._note_end(schedule, end, result)
            completed = self._completed.pop(end.prompt.uid, [])
            if end.is_given_up:
                await self._take_back(flow, completed)

    async def _take_back(self, flow: AgentFlow, completed: Sequence[RolloutResult]) -> None:
        """Completed rollouts of a group that was given up would stay in the pool forever."""
        try:
            for done in completed:
                await flow.take_back(done, "its group was given up")
        except StepwellError as failure:
            log.warning("rollouts of a group that was given up stay in the pool: %s", failure)

    def _remove_task(self, schedule: RolloutSchedule, start: RolloutStart, task: asyncio.Task[None]) -> None:
        """Called at the end of every rollout, also of one that was cancelled before it began."""
        del self._tasks[start]
        schedule.ended(start, None)
        self._changed.set()

    def _note(self, start: RolloutStart, result: RolloutResult) -> None:
        self.counts.add(result, is_validation=start.is_validation)
        if (alarm := self.counts.alarm) not in self._alarms:
            self._alarms.add(alarm)
            log.warning(ALARM, alarm, ALARM_AMONG, result.why)
        if result.is_completed:
            self._completed.setdefault(start.prompt.uid, []).append(result)
        else:
            names = about(trajectory_uid=result.trajectory_uid, prompt_uid=result.prompt_uid, attempt=result.attempt)
            log.info("a rollout was not completed: %s, %s", result.status, result.why, extra=names)
        if result.failure is not None and self.counts.failures[result.failure] == 1:
            log.warning(
                "an agent failed (%s): %s; its rollout is completed with reward %s; more of these are only counted",
                *(result.failure, result.why, result.reward),
            )
        if start.is_validation and self._round is not None:
            self._round.results.append(result)
        self._on_result(result)

    def _note_end(self, schedule: RolloutSchedule, end: ScheduledGroup, last: RolloutResult) -> None:
        for start in end.running:
            self._tasks[start].cancel()
        if end.is_given_up:
            self.counts.given_up += 1
            log.warning(
                "group %s is given up: a rollout failed %d times, last because: %s; %d completed ones are aborted",
                *(end.prompt.uid, last.attempt + 1, last.why or last.status, end.completed),
            )
        elif not end.is_validation:
            self.counts.groups += 1
        if end.is_validation and not schedule.is_validating and self._round is not None:
            self._report(self._round)

    def _report(self, done: ValidationRound) -> None:
        report, self._round = done.report(), None
        log.info("validation at policy version %s: mean reward %s", report.policy_version, report.mean_reward)
        self._on_validation(report)
