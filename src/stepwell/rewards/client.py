"""A client of one reward worker, which is found by the name of its Ray actor."""

import asyncio
import math
from functools import partial
from typing import Any

from stepwell.common.async_calls import Backoff, retry_while_unavailable
from stepwell.errors import NotReady, RewardFailed, StepwellError
from stepwell.pool.api.scoring import RewardRequest, RewardScore
from stepwell.pool.api.transport import ActorAway, ActorFailed, ActorMissing, ActorTransport

TIMEOUT = 60.0
CHECK_TIMEOUT = 2.0
RESTART_PAUSES = Backoff(first=0.2, longest=0.2)
"""The pauses while a worker restarts. It keeps no state, so a repeated request does no harm."""


class RewardClient:
    def __init__(self, name: str, namespace: str, transport: ActorTransport) -> None:
        self._name = name
        self._namespace = namespace
        self._transport = transport

    async def compute_reward(self, request: RewardRequest) -> RewardScore:
        try:
            async with asyncio.timeout(TIMEOUT):
                score = await retry_while_unavailable(partial(self._ask, request), ActorAway, RESTART_PAUSES)
        except TimeoutError:
            raise RewardFailed(f"reward worker {self._name!r} did not answer within {TIMEOUT:g} s") from None
        except ActorFailed as failure:
            raise RewardFailed(f"reward worker {self._name!r}: {failure.reason}") from None
        except NotReady:
            raise
        except StepwellError as failure:
            raise RewardFailed(f"reward worker {self._name!r}: {failure}") from None
        if not math.isfinite(score.reward_score):
            raise RewardFailed(f"reward worker {self._name!r} returned {score.reward_score}, which is no reward")
        return score

    async def check(self) -> None:
        """NotReady if there is no worker, or if it cannot be reached."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT):
                await self._call("__ray_ready__")
        except (ActorAway, TimeoutError) as failure:
            why = str(failure) or f"no answer within {CHECK_TIMEOUT:g} s"
            raise NotReady(f"reward worker {self._name!r} is away: {why}") from None

    async def _ask(self, request: RewardRequest) -> RewardScore:
        score: RewardScore = await self._call("compute_reward", request)
        return score

    async def _call(self, method: str, *args: object) -> Any:
        try:
            return await self._transport.call(self._name, method, args, {})
        except ActorMissing:
            raise NotReady(f"no reward worker named {self._name!r} in Ray namespace {self._namespace!r}") from None
