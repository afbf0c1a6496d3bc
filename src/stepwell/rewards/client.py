"""A reward worker, reached by its Ray actor's name. It has `compute_reward(RewardRequest) -> RewardScore`."""

import asyncio
import math
from typing import Any

import ray
from ray.exceptions import RayError

from stepwell.core.ports import RewardRequest, RewardScore
from stepwell.errors import NotReady, RewardFailed

TIMEOUT = 60.0


class RewardClient:
    def __init__(self, name: str, namespace: str) -> None:
        self._name = name
        self._namespace = namespace

    async def compute_reward(self, request: RewardRequest) -> RewardScore:
        worker = await self._worker()
        try:
            async with asyncio.timeout(TIMEOUT):
                score: RewardScore = await worker.compute_reward.remote(request)
        except TimeoutError:
            raise RewardFailed(f"reward worker {self._name!r} did not answer within {TIMEOUT:g} s") from None
        except RayError as failure:
            cause = getattr(failure, "cause", None) or failure
            raise RewardFailed(f"reward worker {self._name!r}: {type(cause).__name__}: {cause}") from None
        if not math.isfinite(score.reward_score):
            raise RewardFailed(f"reward worker {self._name!r} gave {score.reward_score}, which is no reward")
        return score

    async def check(self) -> None:
        await self._worker()

    async def _worker(self) -> Any:
        try:
            return await asyncio.to_thread(ray.get_actor, self._name, self._namespace)
        except ValueError:
            raise NotReady(f"no reward worker named {self._name!r} in Ray namespace {self._namespace!r}") from None
