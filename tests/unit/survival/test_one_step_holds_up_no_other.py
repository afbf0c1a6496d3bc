"""D2: a message over which a shard fails was sent again for ever, and no step of any other agent was delivered."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from stepwell.pool.slices.producing import AddSteps

from rig.builders import make_step
from rig.local_pool import LocalPool, LocalTransport
from rig.waiting import until
from stepwell.gateway.recording.outbox import Outbox
from stepwell.pool.api.plan import Layout
from stepwell.pool.api.producing import Registration
from stepwell.steps.columns import Columns

BAD = "bad"


class FailingTransport(LocalTransport):
    """Shards that fail over some steps, in the way of a bug, not of a refusal."""

    fails_at_all = False
    failures = 0

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        sent = [asked for asked in args[0] if isinstance(asked, AddSteps)] if method == "run" else []
        if any(self.fails_at_all or has_bad_step(asked.steps) for asked in sent):
            self.failures += 1
            raise RecursionError("maximum recursion depth exceeded")
        return await super().call(shard, method, args, kwargs)


def has_bad_step(columns: Columns) -> bool:
    return any(uid == BAD and length for uid, length in zip(columns.uids, columns.lengths_S, strict=True))


@asynccontextmanager
async def sending(pool: LocalPool) -> AsyncIterator[Outbox]:
    outbox = Outbox(pool, on_refused=lambda _: None, retry_pause=0.001, gather_seconds=0.001)
    task = asyncio.create_task(outbox.run())
    yield outbox
    task.cancel()


def pool_with(trajectories: int) -> LocalPool:
    pool = LocalPool(transport=FailingTransport)
    for number in range(trajectories):
        pool.rules.register(Registration(f"t{number}", "p", group_size=trajectories))
    return pool


def held_steps(pool: LocalPool) -> int:
    return pool.rules.stats().channels["train"].held.steps


async def test_the_steps_beside_a_poisonous_one_are_delivered() -> None:
    pool = pool_with(50)
    async with sending(pool) as outbox:
        outbox.record([make_step(f"t{n}", uid=BAD if n == 20 else f"s{n}") for n in range(50)])
        await until(lambda: held_steps(pool) == 49, "the steps of all others")


async def test_a_poisonous_step_is_quarantined_with_its_cause_when_others_get_through() -> None:
    pool = pool_with(2)
    async with sending(pool) as outbox:
        outbox.record([make_step("t0", uid=BAD), make_step("t0", uid="before")])
        for number in range(10):
            outbox.record([make_step("t1", uid=f"s{number}")])
            await outbox.settle("t1")
            await asyncio.sleep(0.005)  # lets the poisonous step be tried again
        await outbox.settle("t0")
    (quarantined,) = pool.rules.state.quarantine
    assert (quarantined.uid, quarantined.trajectory_uid) == (BAD, "t0")
    assert quarantined.quarantine == "unsendable: RecursionError: maximum recursion depth exceeded"
    assert held_steps(pool) == 11
    assert outbox.lost.total() == 0


async def test_a_step_that_cannot_be_packed_is_quarantined_at_once() -> None:
    pool = pool_with(1)
    async with sending(pool) as outbox:
        outbox.record([make_step("t0", uid="odd", temperature="hot"), make_step("t0", uid="s")])
        await outbox.settle("t0")
    assert [step.uid for step in pool.rules.state.quarantine] == ["odd"]
    assert held_steps(pool) == 1


async def test_a_shard_that_takes_nothing_is_waited_for_and_nothing_is_given_up() -> None:
    pool = pool_with(1)
    pool.transport.fails_at_all = True
    async with sending(pool) as outbox:
        outbox.record([make_step("t0", uid=f"s{number}") for number in range(60)])
        await until(lambda: pool.transport.failures > 300, "many failures")
        pool.transport.fails_at_all = False
        await outbox.settle()
    assert held_steps(pool) == 60
    assert not pool.rules.state.quarantine


async def test_a_shard_that_is_away_holds_up_no_other() -> None:
    pool = LocalPool(shards=2)
    names = pool.plan.shard_names()
    away, present = (next(f"p{n}" for n in range(99) if Layout(1, 2).owner(f"p{n}") == shard) for shard in (0, 1))
    await pool.register_trajectory(Registration("a", away))
    await pool.register_trajectory(Registration("b", present))
    async with sending(pool) as outbox:
        pool.transport.shards_away.add(names[0])
        outbox.record([make_step("a", away, uid="a0"), make_step("b", present, uid="b0")])
        await outbox.settle("b")
        assert outbox.waiting == 1
        pool.transport.shards_away.clear()
        await outbox.settle("a")
    assert outbox.delivered.total() == 2
