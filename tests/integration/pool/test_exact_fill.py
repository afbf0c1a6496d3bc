"""Scored groups and exactly filled batches over several real shards, with others filling and shards dying meanwhile."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rig.actors import pid_of
from rig.builders import EVERYTHING, make_group
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.leasing import ExactFill, LeasedGroups
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.client import PoolClient
from stepwell.pool.client.exact_fill import fill_exactly
from stepwell.pool.client.held_leases import HeldLeases
from stepwell.pool.client.shards import ShardSet
from stepwell.pool.shard.ray_transport import RayTransport
from stepwell.steps.step import Step
from tests.integration.pool.conftest import started

SHARDS = 3
FILL_TIMEOUT = 120.0


@pytest.fixture
def plan(tmp_path: Path) -> PoolPlan:
    return PoolPlan(shards=SHARDS, journal=str(tmp_path))


@pytest.fixture
def client(plan: PoolPlan, namespace: str) -> PoolClient:
    return started(plan, namespace)


def many_groups(count: int, sizes: tuple[int, ...] = (4,)) -> tuple[list[Step], list[Registration]]:
    groups = [make_group(f"p{n}", sizes[n % len(sizes)], ("maths", "games")[n % 2]) for n in range(count)]
    return [step for steps, _ in groups for step in steps], [wanted for _, wanteds in groups for wanted in wanteds]


async def send(client: PoolClient, count: int, sizes: tuple[int, ...] = (4,)) -> None:
    steps, registrations = many_groups(count, sizes)
    assert await client.submit_groups(steps, registrations) == [SubmitVerdict.ACCEPTED] * len(steps)


async def fill(client: PoolClient, trajectories: int, **shares: float) -> LeasedGroups | None:
    return await client.fill_batch(trajectories, channel="train", shares=shares, lease=60.0)


async def test_shards_that_are_killed_meanwhile_lose_nothing(
    client: PoolClient, plan: PoolPlan, namespace: str
) -> None:
    await send(client, 24)
    first = await fill(client, 16)
    assert first is not None
    victims = {name: pid_of(name, namespace) for name in plan.shard_names()[1:]}
    for pid in victims.values():
        os.kill(pid, signal.SIGKILL)
    late_steps, late_registrations = many_groups(27)
    verdicts = await client.submit_groups(late_steps, late_registrations)
    assert verdicts == [SubmitVerdict.DUPLICATE] * 96 + [SubmitVerdict.ACCEPTED] * 12
    await client.ack(first)
    got = [first]
    async with asyncio.timeout(FILL_TIMEOUT):
        while sum(len(filled.columns.uids) for filled in got) < len(late_steps):
            with suppress(PoolUnavailable):  # no shard answers in time
                if (filled := await fill(client, 4)) is not None:
                    got.append(filled)
                    await client.ack(filled)
    uids = [uid for filled in got for uid in filled.columns.uids]
    assert sorted(uids) == sorted(step.uid for step in late_steps)
    assert (await client.stats()).channels["train"].shipped.steps == len(late_steps)


class DeadlyTransport(RayTransport):
    """Kills each shard once, just before it gives its part, or just after, so that its answer is lost."""

    def __init__(self, namespace: str, *, before: bool) -> None:
        super().__init__(namespace)
        self._before = before
        self.killed: set[str] = set()

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if method in ("take_offers", "fill") and shard not in self.killed:
            self.killed.add(shard)
            if not self._before:
                assert await super().call(shard, method, args, kwargs) is not None
            os.kill(pid_of(shard, self._namespace), signal.SIGKILL)
        return await super().call(shard, method, args, kwargs)


@pytest.mark.parametrize("before", [True, False])
async def test_what_a_shard_had_that_is_killed_while_its_part_is_taken_is_in_a_later_batch(
    client: PoolClient, plan: PoolPlan, namespace: str, before: bool
) -> None:
    await send(client, 24)
    transport = DeadlyTransport(namespace, before=before)
    wanted = ExactFill(trajectories=96, channel="train", shares={}, lease=60.0, step_filter=EVERYTHING)
    shards = ShardSet("data_pool", transport)
    held, filled = HeldLeases(shards), None
    async with asyncio.timeout(FILL_TIMEOUT):
        while filled is None:
            with suppress(PoolUnavailable):  # all shards restart
                filled = await fill_exactly(shards, held, wanted, heartbeats=True)
    assert transport.killed == set(plan.shard_names())
    assert sorted(filled.columns.uids) == sorted(step.uid for step in many_groups(24)[0])
    assert filled.attempts == [0] * 24
    await client.ack(filled)
    assert (await client.stats()).channels["train"].shipped.steps == 96


@pytest.mark.parametrize("before", [True, False])
async def test_a_single_shard_fills_a_batch_by_itself_also_when_it_is_killed_meanwhile(
    tmp_path: Path, namespace: str, before: bool
) -> None:
    client = started(PoolPlan(shards=1, journal=str(tmp_path)), namespace)
    await send(client, 6)
    assert await fill(client, 28) is None
    transport = DeadlyTransport(namespace, before=before)
    wanted = ExactFill(trajectories=12, channel="train", shares={"games": 0.9}, lease=60.0, step_filter=EVERYTHING)
    shards = ShardSet("data_pool", transport)
    filled = await fill_exactly(shards, HeldLeases(shards), wanted, heartbeats=True)
    assert transport.killed == {"data_pool"}
    assert filled is not None
    assert (filled.sources, filled.attempts) == (["games"] * 3, [0] * 3)
    await client.ack(filled)
    ready = await client.ready_groups("train")
    assert sum(map(ready.trajectories_of, ready.groups)) == 12
