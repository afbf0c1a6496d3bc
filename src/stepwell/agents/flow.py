"""One rollout: open a trajectory, run the agent in it, complete or abort it.

- A rollout ends as a RolloutResult, whatever the agent raises.
- A failure of the policy completes the rollout with a reward, so that it is trained; a failure of the infrastructure
  aborts it. outcome.py tells them apart.
- A cancelled rollout aborts its trajectory.
- A rollout whose gateway died before it confirmed the last steps is aborted, not completed without them.
- The trajectory's uid is made here, so the opening call can be repeated if the gateway dies before it answers.
"""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Real
from types import MappingProxyType
from typing import Self, TypeVar
from uuid import uuid4

import numpy as np
import orjson
from pydantic import BaseModel, ValidationError

from stepwell.agents.gateway_client import PATIENCE, GatewayClient
from stepwell.agents.outcome import AgentFailed, AgentFailure, cause_of, failure_of_policy
from stepwell.agents.rollout import Rollout, RolloutResult, RolloutStatus, Sample
from stepwell.common.user_input import explain_all
from stepwell.errors import BadRequest, GatewayUnreachable, StepwellError
from stepwell.pool.api.producing import TRAIN
from stepwell.steps.step import Json
from stepwell.wire import gateway_api as shapes

S = TypeVar("S", bound=BaseModel)

NO_REWARDS: Mapping[AgentFailure, float] = MappingProxyType({})
CANCEL_PATIENCE = 5.0
"""Seconds for the abort of a cancelled rollout, because the caller waits for it."""
WHY_KEPT = 500
"""Characters of a failure's text."""


class BadReward(Exception):
    """The agent returned something that is not a reward; the text says why."""


class AgentFlow(ABC):
    """Used inside `async with`. Rollouts may run concurrently."""

    def __init__(
        self,
        gateway: str,
        *,
        key: str | None = None,
        channel: str = TRAIN,
        group_size: int = 8,
        timeout: float = 600.0,
        patience: float = PATIENCE,
        failure_rewards: Mapping[AgentFailure, float] = NO_REWARDS,
        retry_on: tuple[type[BaseException], ...] = (),
    ) -> None:
        """`key` is the gateway's control key. In seconds: `timeout` limits one rollout, `patience` the wait for a
        gateway or pool that is unavailable. `failure_rewards` are the rewards of rollouts in which the policy failed,
        0 where none is given; exceptions in `retry_on` are not the policy's."""
        self.gateway = GatewayClient(gateway, key, patience=patience)
        self.channel = channel
        self.group_size = group_size
        self.timeout = timeout
        self.failure_rewards = failure_rewards
        self.retry_on = retry_on

    @abstractmethod
    async def run(self, rollout: Rollout) -> float | None:
        """Make the rollout; returns its reward, or None if another part scores it."""

    async def rollout(
        self, sample: Sample, prompt_uid: str, *, attempt: int = 0, on_open: Callable[[], None] = lambda: None
    ) -> RolloutResult:
        """One rollout in the group `prompt_uid`. `on_open` is called when the pool has registered it."""
        return await _Attempt(self, sample, prompt_uid, attempt).run(on_open)

    async def take_back(self, done: RolloutResult, why: str) -> None:
        """Abort a completed rollout. One that a trainer already has stays."""
        await self.gateway.abort_trajectory(f"{done.trajectory_uid}/{done.prompt_uid}", why[:WHY_KEPT])

    async def __aenter__(self) -> Self:
        await self.gateway.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.gateway.__aexit__()


class _Attempt:
    """One rollout in progress."""

    def __init__(self, flow: AgentFlow, sample: Sample, prompt_uid: str, attempt: int) -> None:
        self._flow, self._sample = flow, sample
        self._prompt_uid, self._attempt = prompt_uid, attempt
        self._uid = uuid4().hex
        self._ref = f"{self._uid}/{prompt_uid}"
        self._started = time.monotonic()
        self._exception = ""

    async def run(self, on_open: Callable[[], None]) -> RolloutResult:
        try:
            return await self._run(on_open)
        except asyncio.CancelledError:
            with suppress(StepwellError):
                await self._flow.gateway.abort_trajectory(self._ref, "cancelled", CANCEL_PATIENCE)
            raise

    async def _run(self, on_open: Callable[[], None]) -> RolloutResult:
        try:
            rollout = await self._open()
        except StepwellError as failure:
            return self._result(RolloutStatus.FAILED, why=f"it could not be opened: {failure}")
        on_open()
        limit = asyncio.timeout(self._flow.timeout)
        try:
            async with limit:
                reward = as_reward(await self._flow.run(rollout))
        except asyncio.CancelledError:
            if _is_own_task_cancelled():
                raise
            return await self._end_failed(AgentFailed(AgentFailure.ERROR, "it was cancelled from within"))
        except (Exception, SystemExit) as failure:  # noqa: BLE001 - the agent's code must not end the rollouter
            took_too_long = limit.expired() and isinstance(failure, TimeoutError)
            why = f"it took longer than {self._flow.timeout:g} s"
            return await self._end_failed(AgentFailed(AgentFailure.TOO_LONG, why) if took_too_long else failure)
        return await self._complete(reward)

    async def _end_failed(self, failure: BaseException) -> RolloutResult:
        why = str(failure)[:WHY_KEPT] if isinstance(failure, AgentFailed) else described(failure)
        kind, self._exception = failure_of_policy(failure, self._flow.retry_on), cause_of(failure)
        if kind is None:
            return await self._abort(why)
        reward = failure.reward if isinstance(failure, AgentFailed) else None
        return await self._complete(self._flow.failure_rewards.get(kind, 0.0) if reward is None else reward, kind, why)

    async def _open(self) -> Rollout:
        flow = self._flow
        wanted = made(
            shapes.InitTrajectory,
            prompt_uid=self._prompt_uid,
            trajectory_uid=self._uid,
            channel=flow.channel,
            group_size=flow.group_size,
            metadata=portable(self._sample),
            unfinished_reward=flow.failure_rewards.get(AgentFailure.TOO_LONG),
        )
        opened = await flow.gateway.open_trajectory(wanted)
        return Rollout(
            base_url=opened.base_url,
            api_key=opened.api_key,
            sample=self._sample,
            prompt_uid=self._prompt_uid,
            trajectory_uid=self._uid,
            attempt=self._attempt,
            gateway=flow.gateway,
        )

    async def _complete(
        self, reward: float | None, failure: AgentFailure | None = None, why: str = ""
    ) -> RolloutResult:
        try:
            status = await self._flow.gateway.complete_trajectory(self._ref, reward, failure or "", self._exception)
        except GatewayUnreachable as unreachable:
            return await self._abort(f"its last steps may be lost: {unreachable}")
        except StepwellError as refused:
            return self._result(RolloutStatus.FAILED, why=f"it could not be completed: {refused}")
        return self._result(RolloutStatus(status), reward=reward, failure=failure, why=why)

    async def _abort(self, why: str) -> RolloutResult:
        try:
            status = await self._flow.gateway.abort_trajectory(self._ref, why[:WHY_KEPT], exception=self._exception)
        except StepwellError as failure:
            return self._result(RolloutStatus.FAILED, why=f"{why}; and it could not be aborted: {failure}")
        return self._result(RolloutStatus(status), why=why)

    def _result(
        self,
        status: RolloutStatus,
        *,
        reward: float | None = None,
        failure: AgentFailure | None = None,
        why: str = "",
    ) -> RolloutResult:
        return RolloutResult(
            status=status,
            prompt_uid=self._prompt_uid,
            trajectory_uid=self._uid,
            attempt=self._attempt,
            channel=self._flow.channel,
            reward=reward if status is RolloutStatus.COMPLETED else None,
            failure=failure,
            exception=self._exception,
            why=why,
            seconds=time.monotonic() - self._started,
        )


def made(shape: type[S], **fields: object) -> S:
    """BadRequest says which fields are wrong."""
    try:
        return shape.model_validate(fields)
    except ValidationError as wrong:
        raise BadRequest(explain_all(wrong.errors()[:3])) from None


def as_reward(given: object) -> float | None:
    """The return value of an agent, as a reward. BadReward if it is not a finite number or None."""
    if given is None:
        return None
    if not isinstance(given, Real | np.bool_):
        raise BadReward(f"it returned a {type(given).__name__} as its reward; an agent returns a number, or None")
    if not math.isfinite(given):
        raise BadReward(f"it returned {given} as its reward, which is not a finite number")
    return float(given)


def described(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"[:WHY_KEPT]


def portable(sample: Sample) -> dict[str, Json]:
    """The fields of a sample that can be written as JSON: they become the trajectory's metadata, which reward functions
    read."""
    return {name: value for name, value in sample.items() if isinstance(name, str) and _is_portable(value)}


def _is_portable(value: object) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True


def _is_own_task_cancelled() -> bool:
    """Whether this task was cancelled, and not something that the agent awaited."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
