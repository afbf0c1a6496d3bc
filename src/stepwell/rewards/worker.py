"""RewardLoopWorker: the Ray actor that scores the pool's trajectories, and the requests of a gateway.

- Its loop takes trajectories from the pool under a lease, scores them, and returns the judgements; forever. The three
  run at the same time, each in messages of many trajectories. A call that the pool does not answer is repeated.
- A trajectory that is not scored within its lease is left to the worker that takes it next.
- It has no state that it cannot lose: Ray restarts a killed worker, and what it held is scored again after its lease.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeLabelSchedulingStrategy, NotIn

from stepwell.common.async_calls import Backoff, retry_while_unavailable
from stepwell.common.message_format import portable_actor
from stepwell.errors import Conflict, RewardFailed, StepwellError
from stepwell.pool.api.scoring import Judgement, RewardRequest, RewardScore
from stepwell.pool.client import PoolClient
from stepwell.rewards.runner.messages import Job
from stepwell.rewards.runner.runner import RewardRunner
from stepwell.rewards.sample import sample_of, sample_of_request
from stepwell.steps.step import Json, Step

log = logging.getLogger("stepwell.rewards")

T = TypeVar("T")

SPARE_LEASE = 30.0
"""Seconds of a lease beyond the time of two calls. After a lease, another worker scores what a killed worker held."""
TAKE_TIMEOUT = 30.0
GATHER = 0.01
"""Seconds for which judgements are gathered before they are sent."""
MOST_HELD = 2_048


class HoldingPace:
    """How many trajectories a worker holds: those that it works on, and about one second of work more.

    More would keep them from other workers, and their leases would expire here if the function became slow. Fewer
    would let the children wait while the pool is asked.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._held = 0
        self._since = 0.0
        self._finished = 0
        self._per_second = 0.0

    def room(self) -> int:
        """How many to take now; 0 if they are too few for a message."""
        target = min(MOST_HELD, self._slots + int(max(self._finished, self._per_second)))
        room = target - self._held
        return room if 2 * room >= target else 0

    def take(self, count: int) -> None:
        self._held += count

    def finish(self, count: int, now: float) -> None:
        self._held -= count
        self._finished += count
        if now - self._since >= 1.0:
            self._per_second = self._finished / (now - self._since)
            self._since, self._finished = now, 0


class RewardLoop:
    def __init__(
        self, runner: RewardRunner, pool: PoolClient, *, lease: float | None = None, retry_pause: float = 1.0
    ) -> None:
        """`lease`, in seconds, depends on the runner's timeout by default; a pool that does not answer is asked again
        after `retry_pause` seconds."""
        self._runner = runner
        self._pool = pool
        self._lease = SPARE_LEASE + 2 * runner.job.timeout if lease is None else lease
        self._pauses = Backoff(first=retry_pause, longest=retry_pause)
        self._pace = HoldingPace(runner.slots)
        self._has_room = asyncio.Event()
        self._judgements: list[Judgement] = []
        self._has_judgements = asyncio.Event()
        self._scoring: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take())
            tasks.create_task(self._give())

    async def _take(self) -> None:
        while True:
            while (room := self._pace.room()) == 0:
                self._has_room.clear()
                await self._has_room.wait()
            by_step = self._runner.by_step
            take = partial(self._pool.take_unscored, room, lease=self._lease, timeout=TAKE_TIMEOUT, by_step=by_step)
            if (taken := await self._until_answered(take, "no trajectories can be taken now")) is not None:
                self._start_scoring(*taken)

    def _start_scoring(self, lease_uid: str, trajectories: Sequence[Sequence[Step]]) -> None:
        self._pace.take(len(trajectories))
        for steps in trajectories:
            task = asyncio.create_task(self._score(lease_uid, steps))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)

    async def _score(self, lease_uid: str, steps: Sequence[Step]) -> None:
        try:
            async with asyncio.timeout(self._lease):
                attempt = await self._runner.run(sample_of(steps))
        except TimeoutError:
            self._finish(1)
            return
        self._judgements.append(
            Judgement(
                trajectory_uid=steps[0].trajectory_uid,
                prompt_uid=steps[0].prompt_uid,
                lease_uid=lease_uid,
                attempt=attempt,
                source=self._runner.name,
                steps=tuple(step.identity for step in steps),
            )
        )
        self._has_judgements.set()

    async def _give(self) -> None:
        while True:
            await self._has_judgements.wait()
            await asyncio.sleep(GATHER)
            judgements, self._judgements = self._judgements, []
            self._has_judgements.clear()
            give = partial(self._pool.give_judgements, judgements)
            await self._until_answered(give, f"{len(judgements)} judgements wait for the pool")
            self._finish(len(judgements))

    async def _until_answered(self, call: Callable[[], Awaitable[T]], trouble: str) -> T:
        def log_failure(failure: StepwellError, pause: float) -> float:
            log.warning("%s: %s", trouble, failure)
            return pause

        return await retry_while_unavailable(call, StepwellError, self._pauses, before_pause=log_failure)

    def _finish(self, count: int) -> None:
        self._pace.finish(count, time.monotonic())
        self._has_room.set()


# -- the actors --------------------------------------------------------------------------------------------------------

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
