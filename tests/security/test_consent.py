"""What a person did not agree to does not happen: no training, or no keeping."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepwell.pool.slices.producing import AddSteps, Complete, GiveReward, Register

from rig import forgetting as rig
from rig.asked import asked
from rig.builders import EasyPool, make_step
from stepwell.pool.api.leasing import BatchRequest
from stepwell.pool.api.producing import Registration, RewardGiven, SubmitVerdict
from stepwell.pool.api.sessions import CONSENT, RETENTION
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.service import ShardService
from stepwell.steps.arrow import ParquetReader
from stepwell.steps.columns import pack
from stepwell.wire.gateway_api import InitTrajectory


async def rollouts(shard: ShardService, **consents: dict[str, Any]) -> None:
    """By trajectory: its consent."""
    for uid, consent in consents.items():
        (refusal,) = await shard.run([Register(Registration(uid, uid, metadata={CONSENT: consent}))])
        assert refusal is None
        assert await asked(shard, AddSteps(pack([make_step(uid, uid, uid="1")]))) == [SubmitVerdict.ACCEPTED]
        await shard.run([Complete(uid, uid, 1.0)])


async def taken(shard: ShardService, count: int) -> list[str]:
    batch = await shard.take(BatchRequest(count=count, channel="train", untrainable=True), 60.0, "lease")
    assert batch is not None
    await shard.ack("lease")
    return sorted(batch.columns.trajectory_uids)


def archived(archive: Path) -> dict[str, str | None]:
    """By trajectory: the mark of its step."""
    found = ParquetReader(str(archive)).trajectories()
    return {one.steps[0].trajectory_uid: one.steps[0].untrainable for one in found}


@contextmanager
def shard_in(folder: Path) -> Iterator[tuple[ShardService, ParquetArchive]]:
    journal = rig.open_journal(str(folder / "state"))
    try:
        yield rig.open_shard(journal, str(folder / "archive"))
    finally:
        journal.store.close()


async def test_without_consent_to_training_no_trainer_gets_a_step_whatever_it_asks_for(tmp_path: Path) -> None:
    with shard_in(tmp_path) as (shard, files):
        await rollouts(shard, no={"train": False}, yes={"train": True}, silent={})
        assert await taken(shard, 2) == ["silent", "yes"]
        left_out = (await shard.stats()).channels["train"].left_out
        assert {kind: count.steps for kind, count in left_out.items()} == {"no_consent": 1}
        shard.pool.state.retire_history()
        files.flush()
    assert archived(tmp_path / "archive").keys() == {"no", "yes", "silent"}
    assert str(archived(tmp_path / "archive")["no"]).startswith("no_consent")


async def test_without_consent_to_keeping_it_is_trained_and_gone(tmp_path: Path) -> None:
    with shard_in(tmp_path) as (shard, files):
        await rollouts(shard, no={"keep": False}, yes={"keep": True})
        assert await taken(shard, 2) == ["no", "yes"]
        assert shard.pool.state.history.keys() == {"yes"}
        late = RewardGiven(trajectory_uid="no", prompt_uid="no", value=0.5, notes="well done")
        assert not await asked(shard, GiveReward(late)), "it would be in the archive"
        shard.pool.state.retire_history()
        files.flush()
    assert archived(tmp_path / "archive").keys() == {"yes"}
    with shard_in(tmp_path) as (shard, _):
        assert not shard.pool.state.trajectories
        assert await asked(shard, AddSteps(pack([make_step("no", "no", uid="2")]))) == [SubmitVerdict.DELETED]


def test_what_is_neither_to_be_trained_nor_kept_leaves_when_its_turn_comes() -> None:
    pool = EasyPool(rig.PLAN.limits)
    pool.register(Registration("t", "p", metadata={CONSENT: {"train": False, "keep": False}}))
    pool.submit([make_step("t", "p")])
    pool.complete("t", "p", 1.0)
    assert pool.take(1, untrainable=True) is None
    assert not pool.state.history
    assert not pool.state.trajectories


def test_consent_and_retention_are_said_at_the_opening() -> None:
    body = {"metadata": {"a": 1}, "consent": {"train": False}, "retention_seconds": 60}
    asked = InitTrajectory.model_validate(body)
    assert asked.all_metadata == {"a": 1, CONSENT: {"train": False, "keep": True}, RETENTION: 60.0}
    assert InitTrajectory().all_metadata == {}
