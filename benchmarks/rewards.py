"""What a reward costs compared with a bare Ray actor, and whether agents notice that rewards are computed.

Scores: trajectories of one step of 2,048 + 256 tokens wait in a DataPool. One reward worker takes them, calls a
trivial function in child processes that can be killed, and returns its judgements, until the last trajectory
has its reward. For comparison, a bare Ray actor with the same function is asked for the same scores, one call per
trajectory, many in flight; and, as a further figure, 64 trajectories per call. Every reward is checked.

Latency: one client of a real gateway waits for each answer, while the reward worker is idle and while it is overloaded,
in turns. Its function sleeps, like a function that asks a judge: the figure shows who waits for whom,
not how the cores of a machine are shared.

    python -m benchmarks.rewards [--quick]
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rig.ray_cluster import start_ray  # isort: skip # sets Ray's environment, so it comes before Ray

import numpy as np
import ray

from benchmarks.gateway_rig.ours import POOL, our_gateway
from benchmarks.gateway_rig.processes import LoadProcess, module, serving
from benchmarks.gateway_rig.rounds import UNSTREAMED, Course
from benchmarks.report import report
from rig.waiting import wait_until
from stepwell.pool.actors import start_pool
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.client import DataPool, PoolClient
from stepwell.rewards.loading import load
from stepwell.rewards.runner.messages import Job
from stepwell.rewards.sample import Sample, sample_of
from stepwell.rewards.worker import RewardPlan, start_rewards
from stepwell.steps.step import Step, logprobs_array

PROMPT, RESPONSE = 2_048, 256
A_MESSAGE = 32
"""Steps handed in at once."""
IN_FLIGHT = 64
A_CALL = 64
"""Samples of one call of the bare actor's, where it is not asked for one at a time."""
CHANNEL = "validation"
"""So that the trajectories of the gateway's clients stay apart."""
QUEUE = 400
"""Trajectories that wait for a reward while the gateway is measured."""
STORE = 2**30
OF_BARE, OF_IDLE = 0.6, 1.1

FUNCTION = """
import os, time

def trivial(sample):
    return float(sample.steps[0].response_ids[0])

def waits(sample):
    if os.path.exists({slow!r}):
        time.sleep(0.05)
    return 1.0
"""


class GatedPool(PoolClient):
    """Gives workers nothing while a file is there, so that a round begins with all that it will score."""

    def __init__(self, name: str, namespace: str, gate: Path) -> None:
        super().__init__(name, namespace)
        self._gate = gate

    async def take_unscored(self, count: int, *, lease: float, timeout: float, by_step: bool = False) -> Any:
        if self._gate.exists():
            await asyncio.sleep(0.002)
            return None
        return await super().take_unscored(count, lease=lease, timeout=0.1, by_step=by_step)


class BareActor:
    """Calls the function, and nothing else."""

    def __init__(self, function: str) -> None:
        self._call: Any = load(function).call

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        return [self._call(sample) for sample in samples]


class Trajectories:
    """Steps that are trajectories of their own, under new names each round."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._round = 0
        luck = np.random.default_rng(0)
        self._prompt = luck.integers(0, 150_000, PROMPT, dtype=np.int32)
        self._responses = luck.integers(0, 150_000, (count, RESPONSE), dtype=np.int32)
        self._logprobs = logprobs_array(-luck.random(RESPONSE))

    def fresh(self) -> list[Step]:
        self._round += 1
        return [self._step(number) for number in range(self.count)]

    def expected(self) -> list[float]:
        return [float(response[0]) for response in self._responses]

    def _step(self, number: int) -> Step:
        uid = f"{self._round}-{number}"
        return Step(
            prompt_ids=self._prompt,
            response_ids=self._responses[number],
            response_logprobs=self._logprobs,
            trajectory_uid=uid,
            prompt_uid=uid,
            step_index=0,
            is_last=True,
        )


class ThePool:
    """A pool that requires rewards, filled and emptied."""

    def __init__(self, namespace: str) -> None:
        start_pool(PoolPlan(name=POOL, limits=Limits(require_reward=True, max_queue_size=10**6)), namespace)
        self._namespace = namespace
        self.data = DataPool(PoolClient(POOL, namespace))

    def fill(self, steps: Sequence[Step]) -> None:
        async def submit() -> None:
            client = PoolClient(POOL, self._namespace)
            for start in range(0, len(steps), A_MESSAGE):
                await client.submit_steps(steps[start : start + A_MESSAGE], channel=CHANNEL)

        asyncio.run(submit())

    def unscored(self) -> int:
        scoring = self.data.stats().scoring
        assert not scoring.failed, scoring
        return scoring.waiting + scoring.under_way

    def empty(self, count: int) -> dict[str, float | None]:
        batch = self.data.fetch_batch(count, channel=CHANNEL)
        return {step.trajectory_uid: step.reward for step in batch.steps()}


def start_worker(function: str, gate: Path, namespace: str, name: str) -> None:
    plan = RewardPlan(name=name, job=Job(function=function))
    start_rewards(plan, partial(GatedPool, POOL, namespace, gate), namespace)


def score_by_worker(pool: ThePool, gate: Path, steps: Sequence[Step], expected: list[float]) -> float:
    """Scores a second."""
    pool.fill(steps)
    start = time.perf_counter()
    gate.unlink()
    while pool.unscored():
        time.sleep(0.02)
    took = time.perf_counter() - start
    gate.touch()
    rewards = pool.empty(len(steps))
    assert [rewards[step.trajectory_uid] for step in steps] == expected
    return len(steps) / took


def score_by_actor(actor: Any, steps: Sequence[Step], a_call: int, expected: list[float]) -> float:
    start = time.perf_counter()
    waiting: deque[Any] = deque()
    scores: list[float] = []
    for at in range(0, len(steps), a_call):
        if len(waiting) == max(2, IN_FLIGHT // a_call):
            scores += ray.get(waiting.popleft())
        waiting.append(actor.score.remote([sample_of([step]) for step in steps[at : at + a_call]]))
    for answer in waiting:
        scores += ray.get(answer)
    took = time.perf_counter() - start
    assert scores == expected
    return len(steps) / took


def measure_scores(folder: Path, namespace: str, *, rounds: int, count: int) -> dict[str, float]:
    pool, gate = ThePool(namespace), folder / "gate"
    gate.touch()
    function = f"{folder / 'functions.py'}:trivial"
    start_worker(function, gate, namespace, "scores")
    actor: Any = ray.remote(BareActor).options(max_concurrency=1_000, num_cpus=0).remote(function)
    trajectories, rates = Trajectories(count), dict[str, list[float]]()
    expected = trajectories.expected()
    sides = {
        "worker": lambda steps: score_by_worker(pool, gate, steps, expected),
        "bare": lambda steps: score_by_actor(actor, steps, 1, expected),
        "bare_64_a_call": lambda steps: score_by_actor(actor, steps, A_CALL, expected),
    }
    for number in range(rounds + 1):
        names = list(sides)[number % 3 :] + list(sides)[: number % 3]
        now = {name: sides[name](trajectories.fresh()) for name in names}
        print(
            f"scores {number}/{rounds} " + "  ".join(f"{name} {rate:,.0f}/s" for name, rate in now.items()), flush=True
        )
        if number:  # the first warms up
            for name, rate in now.items():
                rates.setdefault(name, []).append(rate)
    ray.kill(ray.get_actor("scores", namespace))
    ray.kill(actor)
    figures = {f"{name}_scores_s": statistics.median(rates[name]) for name in sides}
    return figures | {f"of_{name}": ratio(rates["worker"], rates[name]) for name in sides if name != "worker"}


class Latency:
    """Of a gateway's one client, with and without a reward queue that is longer than its worker can be quick."""

    def __init__(self, course: Course, pool: ThePool, slow: Path, seconds: float) -> None:
        self._course, self._pool, self._slow, self._seconds = course, pool, slow, seconds
        self._trajectories = Trajectories(QUEUE)

    def idle(self) -> float:
        (ours,) = self._course.subjects
        return self._course.measure(ours, UNSTREAMED, 1, self._seconds).load.p50_ms

    def saturated(self) -> float:
        self._slow.touch()
        self._pool.fill(self._trajectories.fresh())
        p50 = self.idle()
        assert self._pool.unscored() > QUEUE / 4, "the reward queue ran dry"
        self._slow.unlink()
        wait_until(lambda: not self._pool.unscored(), "the reward queue to run dry")
        self._pool.empty(QUEUE)
        return p50


def measure_latency(folder: Path, address: str, namespace: str, *, rounds: int, seconds: float) -> dict[str, float]:
    pool = ThePool(namespace)
    start_worker(f"{folder / 'functions.py'}:waits", folder / "no_gate", namespace, "latency")
    p50: dict[str, list[float]] = {"idle": [], "saturated": []}
    with ExitStack() as stack:
        engine = stack.enter_context(serving(module("engine"), folder / "engine.log"))
        load = stack.enter_context(LoadProcess())
        ours = stack.enter_context(our_gateway(engine, folder, address, namespace))
        latency = Latency(Course(engine, load, [ours]), pool, folder / "slow", seconds)
        latency.saturated()  # warms up
        for number in range(1, rounds + 1):
            for name in ("idle", "saturated") if number % 2 else ("saturated", "idle"):
                p50[name].append(getattr(latency, name)())
            now = "  ".join(f"{name} {values[-1]:.3f} ms" for name, values in p50.items())
            print(f"latency {number}/{rounds} {now}", flush=True)
    figures = {f"gateway_p50_{name}_ms": statistics.median(values) for name, values in p50.items()}
    return figures | {"saturated_of_idle": ratio(p50["saturated"], p50["idle"])}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over rounds, each compared with its neighbour."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="What a reward costs.")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as name, start_ray(object_store_memory=STORE) as cluster:
        folder = Path(name)
        (folder / "functions.py").write_text(FUNCTION.format(slow=str(folder / "slow")))
        figures = measure_scores(folder, "scores", rounds=3 if quick else 9, count=2_000 if quick else 6_000)
        figures |= measure_latency(
            folder, cluster.address, "latency", rounds=6 if quick else 20, seconds=1.0 if quick else 1.5
        )
    report(
        {name: round(value, 3) for name, value in figures.items()},
        at_least={"of_bare": OF_BARE},
        at_most={"saturated_of_idle": OF_IDLE},
    )


if __name__ == "__main__":
    main()
