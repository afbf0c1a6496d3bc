"""A journal of schema 7 is taken over: its data, its lease and its deadline, which go on where they stood."""

import gzip
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.pool.api.leasing import BatchRequest, Settlement
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import SubmitVerdict
from stepwell.pool.shard.journal_identity import JournalIdentity
from stepwell.pool.shard.service import ShardService
from stepwell.pool.shard.sqlite_journal import SqliteJournal, read_header
from stepwell.pool.slices.steps import AddSteps
from stepwell.steps.columns import pack, unpack
from tests.builders import make_step
from tests.rig.asked import asked

FIXTURE = Path(__file__).parents[2] / "fixtures" / "journal-7" / "journal.sqlite.gz"
WRITTEN_AT = 1_790_000_000.0
LEASE, DEADLINE = 300.0, 600.0
IDENTITY = JournalIdentity(pool="data_pool", pool_uid="a1", shards=1, index=0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data_pool.sqlite"
    path.write_bytes(gzip.decompress(FIXTURE.read_bytes()))
    os.utime(path, (WRITTEN_AT, WRITTEN_AT))
    return path


@pytest.fixture
def service(path: Path, clock: Clock) -> Iterator[ShardService]:
    journal = SqliteJournal(path, IDENTITY, closed_kept=100, must_exist=True)
    plan = PoolPlan(limits=Limits(group_deadline=DEADLINE), min_free_bytes=0)
    yield ShardService(plan, plan.name, journal=journal, clock=lambda: WRITTEN_AT + 86_400 + clock.now, monotonic=clock)
    journal.close()


async def test_its_steps_are_handed_out_with_all_their_fields(service: ShardService) -> None:
    leased = await service.fetch_batch(BatchRequest(count=2, channel="train"), 1.0)
    steps = unpack(leased.columns, copy=False)
    assert [(step.trajectory_uid, step.model, step.temperature, step.reward) for step in steps] == [
        ("ready", "m", 0.5, 0.25),
        ("done", "m", 0.5, 0.25),
    ]
    assert (await service.serving()).policy_version == 3


async def test_its_lease_and_deadline_have_the_time_that_was_left(service: ShardService, clock: Clock) -> None:
    clock.now = LEASE - 1
    assert (await service.stats()).leases == 1
    assert await service.ack("lease-of-leased") is Settlement.DONE
    clock.now = DEADLINE - 1
    step = make_step("open", "p-open", uid="open-1", started_at=WRITTEN_AT + 1)
    assert await asked(service, AddSteps(pack([step]))) == [SubmitVerdict.ACCEPTED]
    clock.now = DEADLINE + 1
    assert (await service.stats()).unfinished == 1


def test_it_gets_the_identity_of_the_shard_that_opens_it(service: ShardService, path: Path) -> None:
    assert service.pool.state.trajectories.keys() == {"leased", "ready", "done", "open"}
    header = read_header(path)
    assert (header.identity, header.epoch) == (IDENTITY, 1)
