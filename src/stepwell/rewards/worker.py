"""RewardLoopWorker: the Ray actor that scores the pool's trajectories, and the requests of a gateway.

It has no state that it cannot lose: Ray restarts a killed worker, and what it held is scored again after its lease.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeLabelSchedulingStrategy, NotIn

from stepwell.common.message_format import portable_actor
from stepwell.errors import Conflict, RewardFailed, StepwellError
from stepwell.pool.api.scoring import RewardRequest, RewardScore
from stepwell.pool.client import PoolClient
from stepwell.rewards.runner.messages import Job
from stepwell.rewards.runner.runner import RewardRunner
from stepwell.rewards.sample import sample_of_request
from stepwell.steps.step import Json

log = logging.getLogger("stepwell.rewards")

START_TIMEOUT = 180.0
RETRY_PAUSE = 5.0
"""Seconds after which a worker tries again to load its function."""
MOST_REQUESTS = 1_000
"""Requests of gateways that are served at once."""
CPUS = 1.0
"""The CPUs of each worker, unless told."""
SHARE = 0.001
"""The CPUs that a worker without CPUs reserves: Ray does not place an actor that asks for nothing, it takes any
node."""
HEAD = "node:__internal_head__"
"""A resource that only the head's node has."""
NODE_ID = "ray.io/node-id"
"""A label that every node has."""


class ActorOptions(TypedDict):
    """Options of a Ray actor."""

    num_cpus: float
    scheduling_strategy: str | NodeLabelSchedulingStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPlan:
    """The settings of a set of reward workers."""

    name: str = "reward_loop_worker"
    workers: int = 1
    cpus: float | None = None
    """The CPUs that each worker reserves; without, one if there are enough."""
    job: Job

    def worker_names(self) -> tuple[str, ...]:
        """The first has the plan's own name; gateways use that one."""
        return (self.name, *(f"{self.name}-{n}" for n in range(1, self.workers)))


class RewardLoopWorker:
    def __init__(self, plan: RewardPlan, port_factory: Callable[[], PoolClient]) -> None:
        self._plan = plan
        self._port_factory = port_factory
        self._runner = RewardRunner(plan.job)
        self._load_failure: StepwellError | None = None
        self._has_started = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(_exit_process)

    async def plan(self) -> RewardPlan:
        """The plan that it follows, as soon as it works; BadRequest if its function cannot be loaded."""
        await self._has_started.wait()
        if self._load_failure is not None:
            raise self._load_failure
        return self._plan

    async def compute_reward(self, request: RewardRequest) -> RewardScore:
        """RewardFailed if there is no score."""
        await self.plan()
        attempt = await self._runner.run(sample_of_request(request), urgent=True)
        if attempt.score is None:
            raise RewardFailed(f"{self._runner.name}: {attempt.outcome}: {attempt.why}")
        score = attempt.score
        if score.is_abstention:
            raise RewardFailed(f"{self._runner.name} abstains: nothing tells how good it is")
        details: dict[str, Json] = {
            "parts": dict(score.parts),
            "step_rewards": list(score.step_rewards),
            "notes": score.notes,
        }
        return RewardScore(score.value, {name: value for name, value in details.items() if value})

    async def _run(self) -> None:
        while True:
            await self._start()
            if self._load_failure is None:
                await RewardLoop(self._runner, self._port_factory()).run()
            await asyncio.sleep(RETRY_PAUSE)

    async def _start(self) -> None:
        try:
            await self._runner.start()
            self._load_failure = None
            log.info(
                "%s is loaded; generated code runs in a sandbox of level %s", self._runner.name, self._plan.job.sandbox
            )
        except StepwellError as why:
            log.error("%s cannot be loaded: %s", self._plan.job.function, why)
            self._load_failure = why
        self._has_started.set()


def start_rewards(plan: RewardPlan, port_factory: Callable[[], PoolClient], namespace: str) -> RewardPlan:
    """Creates the workers, or finds existing ones; returns the plan that they follow, which may be another one.

    The workers outlive the process that started them, and Ray restarts them. Conflict if some exist with another job
    and others would be created: then one pool would be scored in two ways.
    """
    existing = {name: worker for name in plan.worker_names() if (worker := _find(name, namespace)) is not None}
    plans = _plans_of(existing)
    others = {name: other for name, other in plans.items() if other.job != plan.job}
    missing = [name for name in plan.worker_names() if name not in existing]
    if others and missing:
        raise Conflict(_conflict_text(plan, others, namespace))
    options = place_workers(len(missing), plan.cpus)
    plans |= _plans_of({name: _create(name, plan, port_factory, namespace, options) for name in missing})
    return next(iter(others.values()), plans[plan.name])


def _find(name: str, namespace: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace)
    except ValueError:
        return None


def _create(
    name: str, plan: RewardPlan, port_factory: Callable[[], PoolClient], namespace: str, options: ActorOptions
) -> Any:
    actor: Any = ray.remote(portable_actor(RewardLoopWorker)).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=MOST_REQUESTS,
        **options,
    )
    return actor.remote(plan, port_factory)


def _plans_of(workers: Mapping[str, Any]) -> dict[str, RewardPlan]:
    """Waits until they work. Workers whose function cannot be loaded are killed."""
    try:
        plans = ray.get([worker.plan.remote() for worker in workers.values()], timeout=START_TIMEOUT)
        return dict(zip(workers, plans, strict=True))
    except GetTimeoutError:
        raise RewardFailed(
            f"reward workers {[*workers]} did not start within {START_TIMEOUT:g} s; has the Ray cluster free CPUs? "
            "--cpus says how many each worker reserves"
        ) from None
    except (RayActorError, StepwellError) as failure:
        for worker in workers.values():
            ray.kill(worker)
        raise getattr(failure, "cause", failure) from None


def _conflict_text(plan: RewardPlan, others: Mapping[str, RewardPlan], namespace: str) -> str:
    theirs = ", ".join(f"{name!r} has {other.job.function}" for name, other in others.items())
    return (
        f"no reward worker was started for {plan.job.function}: workers with another function or other settings exist "
        f"already, and all score the same pool: {theirs}; end each of these first "
        f"(ray.kill(ray.get_actor({next(iter(others))!r}, {namespace!r}))), or start with their settings"
    )


def _exit_process(task: asyncio.Task[None]) -> None:
    """A worker whose loop has ended is useless; Ray starts another one."""
    if not task.cancelled():
        log.error("the reward loop ended", exc_info=task.exception())
        os._exit(1)


def place_workers(workers: int, cpus: float | None) -> ActorOptions:
    """Places so many new workers. Without `cpus`, each gets one CPU if there are enough.

    They run on nodes that offer CPUs, and beside Ray's head only if there is no other place. The nodes of gateways and
    dashboards offer no CPUs to others, so that nothing takes the time of agents' calls.
    """
    free = ray.available_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    if cpus is None:
        cpus = CPUS if free >= workers * CPUS else 0.0
        if not cpus:
            log.warning("the Ray cluster has %g free CPUs for %d reward workers, so they reserve none", free, workers)
    if free >= workers * SHARE:
        cpus = max(cpus, SHARE)
    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    offering = {node["NodeID"] for node in nodes if node["Resources"].get("CPU", 0.0) >= CPUS}
    wanted = offering - {node["NodeID"] for node in nodes if HEAD in node["Resources"]} or offering
    avoided = [node["NodeID"] for node in nodes if node["NodeID"] not in wanted]
    if not avoided or not wanted or (cpus > 0 and wanted == offering):
        return ActorOptions(num_cpus=cpus, scheduling_strategy="SPREAD")
    elsewhere = NotIn(*avoided)  # type: ignore[no-untyped-call]
    return ActorOptions(num_cpus=cpus, scheduling_strategy=NodeLabelSchedulingStrategy({NODE_ID: elsewhere}))
