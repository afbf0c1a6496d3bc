"""The way of one rollout: a trajectory is opened, something runs in it, and it is completed or aborted.

What always holds: whatever runs and however it fails, the rollout ends as a RolloutResult; a failure is never a reward;
whoever cancels a rollout has its trajectory aborted; a rollout whose gateway died before it had confirmed the last
steps is aborted, not completed without them. The trajectory is named here, so that a gateway that dies between
taking a call and answering it can be asked again.
"""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from numbers import Real
from types import TracebackType
from typing import Self
from uuid import uuid4

import numpy as np
import orjson
from pydantic import ValidationError

from stepwell.agents.gateway_client import PATIENCE, GatewayClient
from stepwell.agents.rollout import Rollout, RolloutResult, RolloutStatus, Sample
from stepwell.errors import BadRequest, GatewayUnreachable, StepwellError
from stepwell.pool.api.producing import TRAIN
from stepwell.steps.step import Json
from stepwell.wire import gateway_api as shapes

GOODBYE = 5.0
"""Seconds for which a gateway is asked to abort what was cancelled: someone waits for the end."""
WHY_KEPT = 500
"""Characters."""


class BadReward(Exception):
    """What an agent gave is no reward; the text says why."""


class AgentFlow(ABC):
    """Used inside `async with`; runs as many rollouts at a time as it is asked to."""

    def __init__(
        self, gateway: str, *, key: str | None = None, channel: str = TRAIN, group_size: int = 8, timeout: float = 600.0
    ) -> None:
        """`key` is the gateway's control key; `timeout` is in seconds, for one rollout."""
        self.link = GatewayClient(gateway, key)
        self.channel = channel
        self.group_size = group_size
        self.timeout = timeout

    @abstractmethod
    async def run(self, rollout: Rollout) -> float | None:
        """Make the rollout; gives its reward, or None to leave that to others."""

    async def rollout(
        self, sample: Sample, prompt_uid: str, *, attempt: int = 0, on_open: Callable[[], None] = lambda: None
    ) -> RolloutResult:
        """One rollout in the group `prompt_uid`. `on_open` is called once the pool knows of it."""
        return await _Attempt(self, sample, prompt_uid, attempt).run(on_open)

    async def take_back(self, done: RolloutResult, why: str) -> None:
        """Abort a rollout that was completed. One that a trainer has by now is left alone."""
        await self.link.abort_trajectory(f"{done.trajectory_uid}/{done.prompt_uid}", why[:WHY_KEPT], PATIENCE)

    async def __aenter__(self) -> Self:
        await self.link.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.link.__aexit__(kind, error, trace)


class _Attempt:
    """One rollout on its way."""

    def __init__(self, flow: AgentFlow, sample: Sample, prompt_uid: str, attempt: int) -> None:
        self._flow = flow
        self._sample = sample
        self._prompt_uid = prompt_uid
        self._attempt = attempt
        self._uid = uuid4().hex
        self._ref = f"{self._uid}/{prompt_uid}"
        self._started = time.monotonic()

    async def run(self, on_open: Callable[[], None]) -> RolloutResult:
        try:
            return await self._run(on_open)
        except asyncio.CancelledError:
            await self._say_goodbye()
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
        except asyncio.CancelledError as cancelled:
            if _is_ours(cancelled):
                raise
            return await self._abort("it was cancelled from within")
        except (Exception, SystemExit) as failure:  # noqa: BLE001 - someone else's code, which must not end ours
            took_too_long = limit.expired() and isinstance(failure, TimeoutError)
            why = f"it took longer than {self._flow.timeout:g} s" if took_too_long else described(failure)
            return await self._abort(why)
        return await self._complete(reward)

    async def _open(self) -> Rollout:
        flow = self._flow
        try:
            wanted = shapes.InitTrajectory(
                prompt_uid=self._prompt_uid,
                trajectory_uid=self._uid,
                channel=flow.channel,
                group_size=flow.group_size,
                metadata=portable(self._sample),
            )
        except ValidationError as wrong:
            raise BadRequest(str(wrong)) from None
        opened = await flow.link.open_trajectory(wanted, PATIENCE)
        return Rollout(
            base_url=opened.base_url,
            api_key=opened.api_key,
            sample=self._sample,
            prompt_uid=self._prompt_uid,
            trajectory_uid=self._uid,
            attempt=self._attempt,
            link=flow.link,
        )

    async def _complete(self, reward: float | None) -> RolloutResult:
        try:
            status = await self._flow.link.complete_trajectory(self._ref, reward, PATIENCE)
        except GatewayUnreachable as failure:
            return await self._abort(f"its last steps may be lost: {failure}")
        except StepwellError as failure:
            return self._result(RolloutStatus.FAILED, why=f"it could not be completed: {failure}")
        return self._result(RolloutStatus(status), reward=reward)

    async def _abort(self, why: str) -> RolloutResult:
        try:
            status = await self._flow.link.abort_trajectory(self._ref, why[:WHY_KEPT], PATIENCE)
        except StepwellError as failure:
            return self._result(RolloutStatus.FAILED, why=f"{why}; and it could not be aborted: {failure}")
        return self._result(RolloutStatus(status), why=why)

    async def _say_goodbye(self) -> None:
        with suppress(StepwellError):
            await self._flow.link.abort_trajectory(self._ref, "cancelled", GOODBYE)

    def _result(self, status: RolloutStatus, *, reward: float | None = None, why: str = "") -> RolloutResult:
        return RolloutResult(
            status=status,
            prompt_uid=self._prompt_uid,
            trajectory_uid=self._uid,
            attempt=self._attempt,
            channel=self._flow.channel,
            reward=reward if status is RolloutStatus.COMPLETED else None,
            why=why,
            seconds=time.monotonic() - self._started,
        )


def as_reward(given: object) -> float | None:
    """The reward that an agent gave, if it is one."""
    if given is None:
        return None
    if not isinstance(given, Real | np.bool_):
        raise BadReward(f"it gave a {type(given).__name__} as its reward; an agent gives a number, or None")
    if not math.isfinite(given):
        raise BadReward(f"it gave {given} as its reward, which is no number to train with")
    return float(given)


def described(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"[:WHY_KEPT]


def portable(sample: Sample) -> dict[str, Json]:
    """What of a sample JSON can carry: it goes with the trajectory, and reward functions find it there."""
    return {name: value for name, value in sample.items() if isinstance(name, str) and _is_portable(value)}


def _is_portable(value: object) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True


def _is_ours(cancelled: asyncio.CancelledError) -> bool:
    """Whether it is this task that was cancelled, and not something that an agent waited for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
