"""RewardLoopWorker: the Ray actor that scores what the pool holds, and what a gateway asks about.

The actor is a shell. What always holds: it has no state that it cannot lose; killed at any moment it is started again
by Ray, and what it had taken is scored again once its lease is over.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from stepwell.errors import Conflict, RewardFailed, StepwellError
from stepwell.pool.api.ports import RewardSource
from stepwell.pool.api.scoring import RewardRequest, RewardScore, Score
from stepwell.rewards.loop import RewardLoop
from stepwell.rewards.sample import sample_of_request
from stepwell.rewards.sandbox.job import Job
from stepwell.rewards.sandbox.runner import Runner
from stepwell.steps.step import Json

log = logging.getLogger("stepwell.rewards")

START_TIMEOUT = 180.0
TRY_AGAIN = 5.0
"""Seconds after which a worker whose function could not be had tries again."""
REQUESTS = 1_000
"""Calls of a gateway's served at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPlan:
    """What reward workers are made of."""

    name: str = "reward_loop_worker"
    workers: int = 1
    job: Job

    def worker_names(self) -> tuple[str, ...]:
        """The first has the plan's own name, which is the one a gateway is told."""
        return (self.name, *(f"{self.name}-{n}" for n in range(1, self.workers)))


class RewardLoopWorker:
    def __init__(self, plan: RewardPlan, port_factory: Callable[[], RewardSource]) -> None:
        self._plan = plan
        self._port_factory = port_factory
        self._runner = Runner(plan.job)
        self._why_not: StepwellError | None = None
        self._has_tried = asyncio.Event()
        self._life = asyncio.get_running_loop().create_task(self._live())
        self._life.add_done_callback(_end_process)

    async def plan(self) -> RewardPlan:
        """The plan it follows, once it works; BadRequest, in words, if its function cannot be had."""
        await self._has_tried.wait()
        if self._why_not is not None:
            raise self._why_not
        return self._plan

    async def compute_reward(self, request: RewardRequest) -> RewardScore:
        """RewardFailed if no score came of it."""
        await self.plan()
        attempt = await self._runner.run(sample_of_request(request), urgent=True)
        if attempt.score is None:
            raise RewardFailed(f"{self._runner.name}: {attempt.outcome}: {attempt.why}")
        return RewardScore(attempt.score.value, _extra_info(attempt.score))

    async def _live(self) -> None:
        while True:
            await self._start()
            if self._why_not is None:
                await RewardLoop(self._runner, self._port_factory()).run()
            await asyncio.sleep(TRY_AGAIN)

    async def _start(self) -> None:
        try:
            await self._runner.start()
            self._why_not = None
        except StepwellError as why:
            log.error("%s cannot be had: %s", self._plan.job.function, why)
            self._why_not = why
        self._has_tried.set()


def start_rewards(plan: RewardPlan, port_factory: Callable[[], RewardSource], namespace: str) -> RewardPlan:
    """Create the workers, or find them if they are there; gives the plan they follow, another one if any has one.

    They outlive whoever started them, and restart by themselves. Conflict if some are there with another job and some
    would have to be made, for then one pool would be scored in two ways.
    """
    found = {name: worker for name in plan.worker_names() if (worker := _find(name, namespace)) is not None}
    plans = _plans_of(found)
    others = {name: other for name, other in plans.items() if other.job != plan.job}
    missing = [name for name in plan.worker_names() if name not in found]
    if others and missing:
        raise Conflict(_two_ways(plan, others, namespace))
    plans |= _plans_of({name: _make(name, plan, port_factory, namespace) for name in missing})
    return next(iter(others.values()), plans[plan.name])


def _find(name: str, namespace: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace)
    except ValueError:
        return None


def _make(name: str, plan: RewardPlan, port_factory: Callable[[], RewardSource], namespace: str) -> Any:
    made = ray.remote(RewardLoopWorker).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=REQUESTS,
        num_cpus=0,
        scheduling_strategy="SPREAD",
    )
    return made.remote(plan, port_factory)


def _plans_of(workers: Mapping[str, Any]) -> dict[str, RewardPlan]:
    """Once they work; workers whose function cannot be had are ended."""
    try:
        plans = ray.get([worker.plan.remote() for worker in workers.values()], timeout=START_TIMEOUT)
        return dict(zip(workers, plans, strict=True))
    except GetTimeoutError:
        raise RewardFailed(f"reward workers {[*workers]} did not start within {START_TIMEOUT:g} s") from None
    except (RayActorError, StepwellError) as failure:
        for worker in workers.values():
            ray.kill(worker)
        raise getattr(failure, "cause", failure) from None


def _two_ways(plan: RewardPlan, others: Mapping[str, RewardPlan], namespace: str) -> str:
    theirs = ", ".join(f"{name!r} has {other.job.function}" for name, other in others.items())
    return (
        f"no reward worker was started for {plan.job.function}, since workers are there already with another function "
        f"or other settings, and all score the same pool: {theirs}; end each of these first "
        f"(ray.kill(ray.get_actor({next(iter(others))!r}, {namespace!r}))), or start with their settings"
    )


def _end_process(life: asyncio.Task[None]) -> None:
    """Should its loop ever end, a worker is of no use: Ray starts another one."""
    if not life.cancelled():
        log.error("the reward loop ended", exc_info=life.exception())
        os._exit(1)


def _extra_info(score: Score) -> dict[str, Json]:
    info: dict[str, Json] = {}
    if score.parts:
        info["parts"] = dict(score.parts)
    if score.step_rewards:
        info["step_rewards"] = list(score.step_rewards)
    if score.notes:
        info["notes"] = score.notes
    return info
