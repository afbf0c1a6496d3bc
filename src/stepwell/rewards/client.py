"""A client of one reward worker, which is found by the name of its Ray actor."""

import asyncio
import math
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from stepwell.common.retry import Backoff, retry_while_unavailable
from stepwell.errors import NotReady, RewardFailed, StepwellError
from stepwell.pool.api.scoring import RewardRequest, RewardScore

TIMEOUT = 60.0
RESTART_PAUSES = Backoff(first=0.2, longest=0.2)
"""While a worker restarts. It keeps no state, so a repeated request does no harm."""


class RewardClient:
    def __init__(self, name: str, namespace: str) -> None:
        self._name = name
        self._namespace = namespace

    async def compute_reward(self, request: RewardRequest) -> RewardScore:
        try:
            async with asyncio.timeout(TIMEOUT):
                score = await retry_while_unavailable(partial(self._ask, request), RayActorError, RESTART_PAUSES)
        except TimeoutError:
            raise RewardFailed(f"reward worker {self._name!r} did not answer within {TIMEOUT:g} s") from None
        except RayError as failure:
            cause = getattr(failure, "cause", None) or failure
            text = str(cause) if isinstance(cause, StepwellError) else f"{type(cause).__name__}: {cause}"
            raise RewardFailed(f"reward worker {self._name!r}: {text}") from None
        if not math.isfinite(score.reward_score):
            raise RewardFailed(f"reward worker {self._name!r} returned {score.reward_score}, which is no reward")
        return score

    async def check(self) -> None:
        await self._worker()

    async def _ask(self, request: RewardRequest) -> RewardScore:
        score: RewardScore = await (await self._worker()).compute_reward.remote(request)
        return score

    async def _worker(self) -> Any:
        try:
            return await asyncio.to_thread(ray.get_actor, self._name, self._namespace)
        except ValueError:
            raise NotReady(f"no reward worker named {self._name!r} in Ray namespace {self._namespace!r}") from None
