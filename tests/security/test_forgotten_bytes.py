"""After a subject is forgotten, no file has a byte of it: neither texts nor names nor token ids."""

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from stepwell.pool.slices.producing import AddSteps, GiveReward, PlaceSession

from rig import forgetting as rig
from rig.asked import asked
from rig.builders import make_step
from rig.forgetting import ALICE, BOB, PLACES
from rig.local_pool import LocalPool
from rig.postgres import program
from stepwell.errors import Forgotten
from stepwell.pool.api.leasing import BatchRequest, Settlement
from stepwell.pool.api.producing import Registration, RewardGiven, SubmitVerdict
from stepwell.pool.api.sessions import SessionCall, session_prompt_uid
from stepwell.pool.api.watching import Cursor
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.service import ShardService
from stepwell.pool.slices.forgetting import Forget
from stepwell.steps.arrow import ParquetReader
from stepwell.steps.columns import pack

STEPS = (
    *("gateways", "waiting", "archive", "replace", "names", "archive _rewards", "replace _rewards"),
    *("scrub", "done", "end"),
)


@contextmanager
def opened(journal: str, archive: Path) -> Iterator[tuple[ShardService, ParquetArchive]]:
    opened_journal = rig.open_journal(journal)
    try:
        yield rig.open_shard(opened_journal, str(archive))
    finally:
        opened_journal.store.close()


async def finished(shard: ShardService) -> None:
    """A shard that was killed goes on by itself with the first call."""
    await shard.stats()
    async with asyncio.timeout(30):
        while shard.pool.state.tombstones.unfinished:
            await asyncio.sleep(0.01)


def sessions_of(shard: ShardService) -> set[str]:
    return {*shard.pool.state.trajectories, *shard.pool.state.history}


def new_database(server: str) -> str:
    name = f"forget{uuid4().hex[:8]}"
    subprocess.run([program("psql"), server, "-qc", f"CREATE DATABASE {name}"], check=True)
    return f"{server.rpartition('/')[0]}/{name}"


def dump_of(url: str) -> bytes:
    return subprocess.run([program("pg_dump"), url], capture_output=True, check=True).stdout


def archived(archive: Path) -> set[str]:
    return {found.steps[0].trajectory_uid for found in ParquetReader(str(archive)).trajectories()}


async def test_nothing_of_a_forgotten_subject_is_in_any_file_and_all_of_others_is(tmp_path: Path) -> None:
    state, archive = tmp_path / "state", tmp_path / "archive"
    with opened(str(state), archive) as (shard, files):
        await rig.fill(shard, files)
        (state / "data_pool.sqlite.damaged-0").write_text(ALICE)
        before = rig.traces(BOB, archive)
        assert {what.partition(": ")[2] for what in rig.traces(ALICE, state, archive)} >= {
            *(rig.session_of(ALICE, place) for place in PLACES),
            *(f"{place} as <i4" for place in PLACES),
        }
        receipt = await shard.run_long(Forget(ALICE))
        assert rig.traces(ALICE, state, archive) == set()
        assert rig.traces(BOB, archive) == before
        assert sessions_of(shard) == {rig.session_of(BOB, place) for place in ("history", "leased", "open", "ready")}
        assert archived(archive) == {rig.session_of(BOB, place) for place in ("archived", "second")}
        assert await shard.ack("held") is Settlement.DONE
        shard.pool.state.retire_history()
        files.flush()
        assert archived(archive) >= {rig.session_of(BOB, place) for place in ("waiting", "leased", "history")}
    assert receipt.is_done
    where = [one["where"] for one in receipt.removed["trajectories"].values()]
    assert sorted(where) == ["archive", "archive", "archive queue", "history", "lease", "queue", "queue"]
    assert receipt.removed["late_rewards"] == 1
    assert receipt.removed["audit_entries"] == 2
    assert receipt.removed["quarantined"] == len(PLACES)
    assert receipt.removed["set_aside"] == ["data_pool.sqlite.damaged-0"]
    assert [name.startswith("_rewards/") for name in sorted(receipt.removed["files"])] == [True, False]
    assert all(file["sha256_before"] != file["sha256_after"] for file in receipt.removed["files"].values())
    assert ALICE not in str(receipt)


@pytest.mark.parametrize("step", STEPS)
async def test_a_kill_before_any_step_leaves_nothing_once_the_shard_runs_again(tmp_path: Path, step: str) -> None:
    state, archive = tmp_path / "state", tmp_path / "archive"
    assert rig.run_killed(str(state), archive, step) == -signal.SIGKILL
    assert bool(rig.traces(ALICE, state, archive)) is (step not in ("done", "end"))
    with opened(str(state), archive) as (shard, _):
        await finished(shard)
        assert rig.traces(ALICE, state, archive) == set()
        receipt = await shard.run_long(Forget(ALICE))
        assert {one["where"] for one in receipt.removed["trajectories"].values()} > {"queue", "lease", "archive"}
        assert len(receipt.removed["files"]) == 2
        assert archived(archive) == {rig.session_of(BOB, place) for place in ("archived", "second")}
        assert await asked(shard, AddSteps(pack([rig.step_of(ALICE, "open")]))) == [SubmitVerdict.DELETED]


@pytest.mark.parametrize("step", ["", "names", "scrub"])
async def test_a_dump_of_the_database_has_nothing_of_a_forgotten_subject(
    postgres_url: str, tmp_path: Path, step: str
) -> None:
    """Every byte of the dump, in which PostgreSQL writes binary values in hexadecimal."""
    archive = tmp_path / "archive"
    url = new_database(postgres_url)
    assert rig.run_killed(url, archive, step) == (-signal.SIGKILL if step else 0)
    with opened(url, archive) as (shard, _):
        await finished(shard)
        assert {rig.session_of(BOB, "open")} <= sessions_of(shard)
    dump = dump_of(url)
    assert rig.SECRETS[BOB].encode().hex().encode() in dump
    for what, needle in rig.needles(ALICE).items():
        assert needle not in dump, what
        assert needle.hex().encode() not in dump, what
    assert rig.traces(ALICE, archive) == set()


async def test_later_arrivals_are_refused_and_counted(tmp_path: Path) -> None:
    with opened(str(tmp_path / "state"), tmp_path / "archive") as (shard, files):
        await rig.fill(shard, files)
        await shard.run_long(Forget(ALICE))
        session = rig.session_of(ALICE, "archived")
        for call in (SessionCall("fresh", "new", ALICE), SessionCall(session, "new", "another name")):
            (answer,) = await shard.run([PlaceSession(call)])
            assert isinstance(answer, Forgotten)
        late = [rig.step_of(ALICE, place) for place in PLACES]
        assert await asked(shard, AddSteps(pack(late), channel="train")) == [SubmitVerdict.DELETED] * len(PLACES)
        assert (await shard.stats()).refused["forgotten"] == len(PLACES)
        reward = RewardGiven(trajectory_uid=session, prompt_uid=session_prompt_uid(session), value=1.0, notes=ALICE)
        assert not await asked(shard, GiveReward(reward))
        assert rig.traces(ALICE, tmp_path / "state", tmp_path / "archive") == set()


async def test_what_a_trainer_has_does_not_come_back(tmp_path: Path) -> None:
    with opened(str(tmp_path / "state"), tmp_path / "archive") as (shard, files):
        await rig.fill(shard, files)
        await shard.run_long(Forget(ALICE))
        await shard.nack("held")
        leased = await shard.take(BatchRequest(count=2, channel="train"), 60.0, "again")
        assert leased is not None
        assert set(leased.columns.trajectory_uids) == {rig.session_of(BOB, place) for place in ("leased", "ready")}
        stats = await shard.stats()
        channel = stats.channels["train"]
        assert channel.dropped["forgotten"].steps == 3
        assert channel.held.steps == 3, "those of the lease, and the open one"


async def test_watchers_lose_it(tmp_path: Path) -> None:
    """A dashboard that has read everything reads it again, and finds nothing of the subject."""
    with opened(str(tmp_path / "state"), tmp_path / "archive") as (shard, files):
        await rig.fill(shard, files)
        before = await shard.changes(Cursor(), 1000)
        await shard.run_long(Forget(ALICE))
        page = await shard.changes(before.cursor, 1000)
        assert page.reset
        assert not any(ALICE.partition(".")[0] in str(snapshot) for snapshot in page.snapshots)
        assert await shard.quarantined() != []
        assert not any(step.trajectory_uid.startswith("alice") for step in await shard.quarantined())


async def test_a_subject_named_in_the_metadata_of_a_rollout_is_forgotten_too_and_its_group_goes_on() -> None:

    pool = LocalPool(shards=2)
    for uid, subject in (("a", ALICE), ("b", BOB)):
        await pool.register_trajectory(Registration(uid, "p", group_size=2, metadata={"subject": subject}))
        await pool.submit_steps([make_step(uid, "p", uid=uid)])
        await pool.complete_trajectory(uid, "p", 1.0)
    receipts = await pool.ask_long(Forget(ALICE))
    assert all(receipt.is_done for receipt in receipts)
    assert len({receipt.subject for receipt in receipts}) == 1
    batch = await pool.fetch_batch(1)
    assert [step.trajectory_uid for step in batch.steps()] == ["b"]
    with pytest.raises(Forgotten):
        await pool.register_trajectory(Registration("c", "q", metadata={"subject": ALICE}))
