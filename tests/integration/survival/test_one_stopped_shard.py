"""D13: with one of three shards stopped (SIGSTOP), a pool answers soon, and says what is missing."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Iterator
from typing import TypeVar

from stepwell.pool.actors import start_pool

from rig.actors import pid_of
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import PoolClient

T = TypeVar("T")

BOUND = 8.0
"""Seconds. The promise is two on a machine that is not busy; a call that waits for the shard takes thirty."""


@contextlib.contextmanager
def stopped(shard: str, namespace: str) -> Iterator[None]:
    pid = pid_of(shard, namespace)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def in_time(call: Awaitable[T]) -> T:
    began = time.monotonic()
    answer = await call
    assert time.monotonic() - began < BOUND
    return answer


def test_questions_to_the_pool_are_answered_and_the_version_arrives_later(namespace: str) -> None:
    start_pool(PoolPlan(shards=3), namespace)

    async def ask(shard: str) -> None:
        client = PoolClient("data_pool", namespace)
        with stopped(shard, namespace):
            assert (await in_time(client.stats())).missing == (shard,)
            assert (await in_time(client.pacing("train"))).missing == (shard,)
            assert (await in_time(client.ready_groups("train"))).missing == (shard,)
            version = (await client.stats()).policy_version + 1
            await in_time(client.set_policy_version(version))
        deadline = time.monotonic() + 60
        while (await client.shards.at(shard).serving()).policy_version != version:
            assert time.monotonic() < deadline, "waited 60 s for the version to arrive"

    for shard in ("data_pool", "data_pool-2"):
        asyncio.run(ask(shard))
