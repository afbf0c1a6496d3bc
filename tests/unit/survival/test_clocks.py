"""D9: leases and deadlines count the seconds that a shard runs, whatever the wall clock does while it is up or down."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from stepwell.pool.slices.producing import AddSteps, Complete, Register

from rig.asked import asked
from rig.builders import make_step
from stepwell.pool.api.leasing import BatchRequest, Settlement
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.shard.service import ShardService
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.steps.columns import pack

ONE = BatchRequest(count=1, channel="train")
HOUR = 3600.0
LEASE, DEADLINE = 60.0, 100.0


@dataclass
class Clocks:
    wall: float = 1_700_000_000.0
    monotonic: float = 500.0

    def run(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


class Shard:
    """A shard with its journal, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.clocks = Clocks()
        self.path = folder / "pool.sqlite"
        self.start()

    def start(self) -> None:
        self.journal = SqliteJournal(self.path, closed_kept=100)
        plan = PoolPlan(limits=Limits(group_deadline=DEADLINE, unfinished_reward=None), min_free_bytes=0)
        self.service = ShardService(
            plan,
            plan.name,
            journal=self.journal,
            clock=lambda: self.clocks.wall,
            monotonic=lambda: self.clocks.monotonic,
        )

    def kill(self) -> None:
        self.journal.store.close()

    async def begin(self, uid: str) -> None:
        """A trajectory with a step, which is not complete."""
        await self.service.run([Register(Registration(uid, uid))])
        step = make_step(uid, uid, uid=uid, started_at=self.clocks.wall)
        assert await asked(self.service, AddSteps(pack([step]))) == [SubmitVerdict.ACCEPTED]

    async def lease(self, uid: str) -> None:
        """A complete trajectory under a lease of its name."""
        await self.begin(uid)
        assert await self.service.run([Complete(uid, uid, 1.0)]) == [EndResult.COMPLETED]
        leased = await self.service.take(ONE, LEASE, uid)
        assert leased is not None
        assert leased.columns.trajectory_uids == [uid]

    async def counts(self) -> tuple[int, int, int]:
        """Leases, groups that are not leased, dropped steps."""
        stats = await self.service.stats()
        channel = stats.channels["train"]
        return stats.leases, channel.groups, sum(count.steps for count in channel.dropped.values())


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    return Shard(tmp_path)


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_a_jump_of_the_wall_clock_drops_nothing_and_leases_nothing_twice(shard: Shard, jump: float) -> None:
    await shard.begin("open")
    await shard.lease("leased")
    shard.clocks.wall += jump
    shard.clocks.run(LEASE - 1)
    assert await shard.counts() == (1, 1, 0)
    assert await shard.service.take(ONE, LEASE, "another") is None
    assert await shard.service.ack("leased") is Settlement.DONE
    shard.kill()


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_leases_and_deadlines_end_in_time_after_a_jump(shard: Shard, jump: float) -> None:
    await shard.begin("open")
    await shard.lease("leased")
    shard.clocks.wall += jump
    shard.clocks.run(LEASE + 1)
    assert await shard.counts() == (0, 2, 0)
    shard.clocks.run(DEADLINE - LEASE)
    assert await shard.counts() == (0, 1, 1)
    shard.kill()


async def test_the_grace_after_a_completion_is_not_ended_by_a_jump(shard: Shard) -> None:
    await shard.begin("t")
    began = shard.clocks.wall
    await shard.service.run([Complete("t", "t", 1.0)])
    shard.clocks.wall += HOUR
    late = make_step("t", "t", uid="in flight", started_at=began)
    assert await asked(shard.service, AddSteps(pack([late]))) == [SubmitVerdict.ACCEPTED]
    shard.kill()


@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
@pytest.mark.parametrize(
    ("age", "verdict"), [(20.0, SubmitVerdict.ACCEPTED), (2.0, SubmitVerdict.LATE)], ids=["in flight", "begun later"]
)
async def test_a_late_step_is_judged_by_its_age_whatever_the_clock_of_its_gateway_says(
    shard: Shard, ahead: float, age: float, verdict: SubmitVerdict
) -> None:
    await shard.begin("t")
    await shard.service.run([Complete("t", "t", 1.0)])
    shard.clocks.run(10.0)
    sent_at = shard.clocks.wall + ahead
    late = pack([make_step("t", "t", uid="late", started_at=sent_at - age)])
    assert await asked(shard.service, AddSteps(replace(late, sent_at=sent_at))) == [verdict]
    shard.kill()


async def test_a_step_of_a_gateway_whose_clock_was_set_back_meanwhile_is_taken_in_its_grace(shard: Shard) -> None:
    await shard.begin("t")
    began = shard.clocks.wall
    await shard.service.run([Complete("t", "t", 1.0)])
    shard.clocks.run(10.0)
    late = pack([make_step("t", "t", uid="late", started_at=began)])
    assert await asked(shard.service, AddSteps(replace(late, sent_at=began - HOUR))) == [SubmitVerdict.ACCEPTED]
    shard.kill()


async def test_time_stands_still_while_a_shard_is_down(shard: Shard) -> None:
    await shard.begin("open")
    await shard.lease("leased")
    shard.clocks.run(LEASE / 2)
    await shard.service.stats()
    shard.kill()
    shard.clocks.wall += 24 * HOUR
    shard.clocks.monotonic = 3.0  # of another boot
    shard.start()
    assert await shard.counts() == (1, 1, 0)
    shard.clocks.run(LEASE / 2 - 1)
    assert await shard.counts() == (1, 1, 0)
    shard.clocks.run(2)
    assert await shard.counts() == (0, 2, 0), "the lease is over after the seconds that were left"
    shard.kill()


async def test_an_idle_shard_that_is_asked_now_and_then_loses_only_seconds(shard: Shard) -> None:
    await shard.lease("leased")
    for _ in range(11):
        shard.clocks.run(5.0)
        await shard.service.stats()
    shard.kill()
    shard.start()
    shard.clocks.run(6.0)
    assert await shard.counts() == (0, 1, 0)
    shard.kill()


async def test_where_the_pool_time_is_lost_leases_and_deadlines_go_on_from_the_last_change(shard: Shard) -> None:
    await shard.begin("open")
    await shard.lease("leased")
    shard.clocks.run(10.0)
    shard.journal.db.execute("DELETE FROM meta WHERE key = 'pool_time'")
    shard.kill()
    for file in shard.path.parent.iterdir():
        os.utime(file, (shard.clocks.wall, shard.clocks.wall))
    shard.clocks.wall += HOUR
    shard.start()
    shard.clocks.run(LEASE - 11)
    assert await shard.counts() == (1, 1, 0)
    shard.clocks.run(2.0)
    assert await shard.counts() == (0, 2, 0)
    shard.kill()
