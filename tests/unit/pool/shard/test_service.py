"""One shard as a plain class, with a clock and files that the test hands in."""

import asyncio
import logging
from pathlib import Path

import pytest
from stepwell.pool.slices.producing import Abort, AddSteps, ChannelIfOpen, Complete, GiveReward, Register, TakeUnscored

from rig.asked import ONE, asked, trained
from rig.builders import make_step
from stepwell.errors import Conflict, FetchTimeout, UnknownTrajectory
from stepwell.pool.api.leasing import Settlement
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import (
    EndResult,
    Registration,
    RewardGiven,
    SubmitVerdict,
)
from stepwell.pool.api.transport import SERVING, UNSCORED, UNSEEN
from stepwell.pool.api.watching import Cursor
from stepwell.pool.client import PoolClient
from stepwell.pool.client.in_process import InProcessTransport
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.service import ShardService
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.pool.slices.curation import Curate, Curation, CurationAction, CurationOutcome
from stepwell.pool.slices.policy import ChangeEngines
from stepwell.steps.columns import pack


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_service(clock: Clock, journal: SqliteJournal | None = None, **limits: object) -> ShardService:
    plan = PoolPlan(limits=Limits(**limits))  # type: ignore[arg-type]
    return ShardService(plan, plan.name, journal=journal, clock=clock, monotonic=clock, recheck_interval=0.01)


def open_journal(path: Path) -> SqliteJournal:
    return SqliteJournal(path, closed_kept=100)


async def rollout(service: ShardService, uid: str = "t", prompt: str = "p", reward: float | None = 1.0) -> None:
    await service.run([Register(Registration(uid, prompt))])
    assert await asked(service, AddSteps(pack([make_step(uid, prompt)]))) == [SubmitVerdict.ACCEPTED]
    assert await service.run([Complete(uid, prompt, reward)]) == [EndResult.COMPLETED]


async def test_calls_that_share_a_message_are_answered_each_for_itself(clock: Clock) -> None:
    service = make_service(clock)
    answers = await service.run(
        [
            ChannelIfOpen("t", "p"),
            Register(Registration("t", "p")),
            ChannelIfOpen("t", "p"),
            Register(Registration("t", "other")),
            Complete("stranger", "p", None),
            Abort("t", "p"),
        ]
    )
    assert answers[:3] == [None, None, "train"]
    assert isinstance(answers[3], Conflict)
    assert isinstance(answers[4], UnknownTrajectory)
    assert answers[5] is EndResult.ABORTED


async def test_a_failure_of_one_call_is_logged_and_costs_the_others_nothing(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = make_service(clock)

    def fail(*_: object) -> bool:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(service.pool.ingest, "channel_if_open", fail)
    with caplog.at_level(logging.ERROR):
        failed, registered = await service.run([ChannelIfOpen("t", "p"), Register(Registration("t", "p"))])
    assert isinstance(failed, ZeroDivisionError)
    assert registered is None
    assert "a fault of ours" in caplog.text


async def test_a_batch_comes_back_when_its_lease_ends_and_is_trained_when_it_is_acknowledged(clock: Clock) -> None:
    service = make_service(clock)
    await rollout(service)
    leased = await service.take(ONE, 60.0, "first")
    assert leased is not None
    assert leased.leases == (("data_pool", "first"),)
    clock.now += 61.0
    again = await trained(service)
    assert again.attempts == [1]
    assert await service.ack("first") is Settlement.EXPIRED
    assert (await service.stats()).channels["train"].shipped.steps == 1


async def test_a_waiting_fetch_gets_a_group_whose_lease_ends_meanwhile(clock: Clock) -> None:
    service = make_service(clock)
    client = PoolClient("data_pool", transport=InProcessTransport({"data_pool": service}))
    await rollout(service)
    assert await service.take(ONE, 60.0, "first") is not None
    waiting = asyncio.create_task(client.fetch_batch(1, timeout=30.0, lease=60.0))
    await asyncio.sleep(0)
    clock.now += 61.0
    assert (await waiting).attempts_G.tolist() == [1]


async def test_a_fetch_that_times_out_says_what_is_missing(clock: Clock) -> None:
    client = PoolClient("data_pool", transport=InProcessTransport({"data_pool": make_service(clock)}))
    with pytest.raises(FetchTimeout, match=r"^waited 0 s for 1 ready groups"):
        await client.fetch_batch(1, timeout=0.0)


async def test_a_trajectory_whose_scoring_lease_ends_is_offered_again(clock: Clock) -> None:
    service = make_service(clock, require_reward=True)
    await rollout(service, reward=None)
    seen = {UNSCORED: (await service.wait_news("worker", {UNSCORED: UNSEEN}, 0.0))[UNSCORED].revision}
    assert await asked(service, TakeUnscored(1, 10.0, "lease")) is not None
    assert await service.wait_news("worker", seen, 0.0) == {}
    waiting = asyncio.create_task(service.wait_news("worker", seen, 30.0))
    await asyncio.sleep(0)
    clock.now += 11.0
    assert UNSCORED in await waiting


async def test_a_new_policy_version_ends_the_wait_for_it(clock: Clock) -> None:
    service = make_service(clock)
    known = (await service.wait_news("gateway", {SERVING: UNSEEN}, 0.0))[SERVING]
    assert known.value == await service.serving()
    assert await service.wait_news("gateway", {SERVING: known.revision}, 0.0) == {}
    waiting = asyncio.create_task(service.wait_news("gateway", {SERVING: known.revision}, 30.0))
    await asyncio.sleep(0)
    newer = await service.set_policy_version(3)
    assert (await waiting)[SERVING].value == newer
    assert newer.policy_version == 3
    assert known.value.is_older_than(newer)


async def test_the_list_of_engines_is_in_the_order_of_joining_and_survives_a_restart(
    clock: Clock, tmp_path: Path
) -> None:
    journal = open_journal(tmp_path / "pool.sqlite")
    service = make_service(clock, journal)
    assert (await service.serving()).engines is None, "no one has named an engine"
    await asked(service, ChangeEngines(("http://a", "http://b")))
    await asked(service, ChangeEngines(("http://c", "http://b"), ("http://a",)))
    assert (await service.serving()).engines == ("http://b", "http://c")
    await service.set_policy_version(4)
    before = await service.serving()
    journal.store.close()
    journal = open_journal(tmp_path / "pool.sqlite")
    restarted = make_service(clock, journal)
    after = await restarted.serving()
    assert (after.policy_version, after.engines) == (4, ("http://b", "http://c"))
    assert not after.is_older_than(before), "a follower takes what another process says"
    journal.close()


async def test_a_service_with_the_journal_of_another_continues_where_that_was_killed(
    clock: Clock, tmp_path: Path
) -> None:
    journal = open_journal(tmp_path / "pool.sqlite")
    service = make_service(clock, journal)
    await rollout(service)
    assert await service.take(ONE, 60.0, "lease") is not None
    cursor = (await service.changes(Cursor(), 10)).cursor
    journal.store.close()
    journal = open_journal(tmp_path / "pool.sqlite")
    service = make_service(clock, journal)
    page = await service.changes(cursor, 10)
    assert (page.reset, len(page.snapshots)) == (True, 1)
    assert await service.ack("lease") is Settlement.DONE
    journal.close()


async def test_what_a_refused_call_changed_is_in_the_journal_too(clock: Clock, tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "pool.sqlite")
    service = make_service(clock, journal)
    await service.run([Register(Registration("t", "p")), Register(Registration("t", "other"))])
    journal.store.close()
    journal = open_journal(tmp_path / "pool.sqlite")
    assert await make_service(clock, journal).run([ChannelIfOpen("t", "p")]) == ["train"]
    journal.close()


@pytest.mark.parametrize("archived", [False, True])
async def test_a_reward_after_shipping_is_kept_only_in_an_archive_and_a_repeated_relabel_once(
    clock: Clock, tmp_path: Path, archived: bool
) -> None:
    pytest.importorskip("pyarrow")
    journal = open_journal(tmp_path / "pool.sqlite")
    archive = ParquetArchive(str(tmp_path / "archive"), "data_pool", journal) if archived else None
    service = ShardService(PoolPlan(), "data_pool", journal=journal, archive=archive, clock=clock, monotonic=clock)
    await rollout(service)
    thumb = RewardGiven(trajectory_uid="t", prompt_uid="p", value=0.5, source="human")
    assert await asked(service, GiveReward(thumb)), "it is not shipped yet"
    assert (await trained(service)).columns.rewards_S.tolist() == [0.5]
    assert await asked(service, GiveReward(thumb)) is archived
    relabels = [
        Curation(action=CurationAction.RELABEL, trajectory_uid="t", prompt_uid="p", by=by, reward=reward)
        for by, reward in (("ana", 0.25), ("ana", 0.25), ("bo", 0.75))
    ]
    assert [await asked(service, Curate(relabel)) for relabel in relabels] == [CurationOutcome.LATE] * 3
    assert [reward.value for _, reward in journal.late_rewards()] == ([0.5, 0.25, 0.75] if archived else [])
    assert all(reward.at == clock.now for _, reward in journal.late_rewards())
    journal.close()
