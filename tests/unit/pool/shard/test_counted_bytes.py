"""What a pool counts as held is what its process grows by."""

import asyncio
import gc
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from stepwell.pool.slices.producing import AddSteps, Register

from rig.asked import asked
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import TRAIN, Registration
from stepwell.pool.shard.service import GC_THRESHOLD, ShardService
from stepwell.steps.columns import pack
from stepwell.steps.step import Step, ids_array, logprobs_array

PAGE = 4_096


@dataclass(frozen=True, slots=True)
class Load:
    trajectories: int
    group: int
    steps: int
    tokens: int
    """New ones, in the prompt of a step. The response has a quarter of that."""
    completed: bool


LOADS = {
    "open trajectories without a step": Load(4_000, 1, 0, 0, False),
    "open trajectories of small steps": Load(1_200, 1, 4, 40, False),
    "complete groups of small steps": Load(4_000, 8, 2, 40, True),
    "complete groups of long steps": Load(800, 8, 2, 2_000, True),
}


async def hold(shard: ShardService, load: Load) -> None:
    luck = np.random.default_rng(0)
    for _ in range(load.trajectories // load.group):
        prompt_uid, uids = uuid4().hex, [uuid4().hex for _ in range(load.group)]
        await shard.run([Register(Registration(uid, prompt_uid, TRAIN, load.group)) for uid in uids])
        steps = [step for uid in uids for step in conversation(uid, prompt_uid, load, luck)]
        for start in range(0, len(steps), 4):
            await asked(shard, AddSteps(pack(steps[start : start + 4])))


def conversation(uid: str, prompt_uid: str, load: Load, luck: np.random.Generator) -> list[Step]:
    steps, context = [], ids_array([])
    for turn in range(load.steps):
        context = np.concatenate([context, luck.integers(0, 150_000, load.tokens, np.int32)])
        response = luck.integers(0, 150_000, load.tokens // 4, np.int32)
        step = Step(
            prompt_ids=context,
            response_ids=response,
            response_logprobs=logprobs_array(-luck.random(len(response))),
            trajectory_uid=uid,
            prompt_uid=prompt_uid,
            uid=uuid4().hex,
            started_at=float(turn),
            is_last=load.completed and turn == load.steps - 1,
        )
        steps.append(step)
        context = np.concatenate([context, response])
    return steps


async def grow(load: Load) -> tuple[int, int]:
    """The bytes that the process grows by, and those that the pool counts."""
    gc.set_threshold(*GC_THRESHOLD)
    shard = ShardService(PoolPlan(limits=Limits(max_queue_size=10**6)), "data_pool")
    await hold(shard, load)  # what the first messages bring stays, whatever is held
    before, counted = resident(), shard.pool.state.channels[TRAIN].nbytes
    await hold(shard, load)
    return resident() - before, shard.pool.state.channels[TRAIN].nbytes - counted


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def measure(load: Load) -> tuple[int, int]:
    return asyncio.run(grow(load))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())
def test_a_pool_counts_the_memory_that_it_takes(load: Load) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        grown, counted = process.submit(measure, load).result()
    assert counted == pytest.approx(grown, rel=0.25), f"{grown / load.trajectories:.0f} bytes a trajectory"
