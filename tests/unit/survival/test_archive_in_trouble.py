"""D7: an archive that is slow or fails holds up no call, loses nothing within its bound, and heals by itself."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import fsspec
import pyarrow.parquet
import pytest
from fsspec.implementations.local import LocalFileSystem
from stepwell.pool.slices.producing import AddSteps, Complete, Register

from rig.asked import asked, trained
from rig.builders import make_step
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.service import ShardService
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.pool.state.records import A_GROUP, A_PACKED_STEP, A_TRAJECTORY
from stepwell.steps.columns import pack

T = TypeVar("T")

BOUND = 0.5
"""Seconds that a call may take."""
PER_FILE = 2


class EndpointUnreachable(Exception):
    """As a cloud's own library raises it: no OSError."""


class TroubledFileSystem(LocalFileSystem):  # type: ignore[misc]
    """A folder that can be slow or fail."""

    protocol = "troubled"
    cachable = False
    may_write: ClassVar[threading.Event] = threading.Event()
    fails: ClassVar[bool] = False

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._be_in_trouble()
        super().makedirs(path, exist_ok)

    def open(self, path: str, mode: str = "rb", **named: Any) -> Any:
        self._be_in_trouble()
        return super().open(path, mode, **named)

    def mv(self, path1: str, path2: str, **named: Any) -> None:
        self._be_in_trouble()
        super().mv(path1, path2, **named)

    def _be_in_trouble(self) -> None:
        assert self.may_write.wait(30)
        if TroubledFileSystem.fails:
            raise EndpointUnreachable("could not connect")


fsspec.register_implementation("troubled", TroubledFileSystem, clobber=True)


journals: list[SqliteJournal] = []


@pytest.fixture(autouse=True)
def _no_trouble() -> Iterator[None]:
    """Before and after each test; its journals are closed."""
    TroubledFileSystem.may_write.set()
    TroubledFileSystem.fails = False
    yield
    TroubledFileSystem.may_write.set()
    for journal in journals:
        journal.store.close()
    journals.clear()


def opened(folder: Path, **settings: Any) -> ShardService:
    journal = SqliteJournal(folder / "pool.sqlite", closed_kept=1000)
    journals.append(journal)
    url = f"troubled://{folder}/archive"
    archive = ParquetArchive(url, "data_pool", journal, groups_per_file=PER_FILE, retry_pause=0.05, **settings)
    return ShardService(PoolPlan(), "data_pool", journal=journal, archive=archive)


async def in_time(call: Awaitable[T]) -> T:
    began = time.monotonic()
    answer = await call
    assert time.monotonic() - began < BOUND
    return answer


async def train(service: ShardService, *uids: str) -> None:
    """One group after the other is sent, taken and acknowledged."""
    for uid in uids:
        await in_time(service.run([Register(Registration(uid, uid))]))
        assert await in_time(asked(service, AddSteps(pack([make_step(uid, uid)])))) == [SubmitVerdict.ACCEPTED]
        await in_time(service.run([Complete(uid, uid, 1.0)]))
        await in_time(trained(service))


async def until_waiting(service: ShardService, groups: int) -> None:
    deadline = time.monotonic() + 30
    while (await in_time(service.stats())).archiving.waiting_groups != groups:
        assert time.monotonic() < deadline, "waited 30 s for the archive"
        await asyncio.sleep(0.01)


def archived(folder: Path) -> list[str]:
    files = sorted((folder / "archive").glob("*.parquet"))
    return sorted(uid for file in files for uid in pyarrow.parquet.read_table(file)["trajectory_uid"].to_pylist())


async def until_named(service: ShardService, folder: Path, uids: list[str]) -> None:
    deadline = time.monotonic() + 30
    while archived(folder) != uids:
        assert time.monotonic() < deadline, f"waited 30 s for {uids}, found {archived(folder)}"
        await service.stats()
        await asyncio.sleep(0.01)


async def test_a_slow_archive_holds_up_no_call(tmp_path: Path) -> None:
    service = opened(tmp_path)
    TroubledFileSystem.may_write.clear()
    await train(service, "a", "b", "c", "d", "e")
    stats = await in_time(service.stats())
    assert (stats.archiving.waiting_groups, stats.archiving.files) == (5, 0)
    TroubledFileSystem.may_write.set()
    await until_named(service, tmp_path, ["a", "b", "c", "d"])
    assert (await service.stats()).archiving.waiting_groups == 1


async def test_a_failure_of_any_kind_is_counted_and_what_waits_is_written_later(tmp_path: Path) -> None:
    service = opened(tmp_path)
    TroubledFileSystem.fails = True
    await train(service, "a", "b", "c", "d")
    deadline = time.monotonic() + 30
    while (await in_time(service.stats())).archiving.failures < 3:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert archived(tmp_path) == []
    TroubledFileSystem.fails = False
    await until_named(service, tmp_path, ["a", "b", "c", "d"])
    assert not list((tmp_path / "archive").glob("*.part"))


async def test_groups_that_wait_have_a_bound_and_what_is_dropped_is_counted(tmp_path: Path) -> None:
    step = make_step("a", "a")
    nbytes = step.prompt_ids.nbytes + step.response_ids.nbytes + len(step.response_ids) * 4
    nbytes += A_GROUP + A_TRAJECTORY + A_PACKED_STEP
    service = opened(tmp_path, max_bytes=3 * nbytes)
    TroubledFileSystem.may_write.clear()
    await train(service, *"abcdefgh")
    stats = (await service.stats()).archiving
    assert (stats.waiting_groups, stats.waiting_bytes, stats.dropped_groups) == (3, 3 * nbytes, 5)
    TroubledFileSystem.may_write.set()
    await until_waiting(service, 1)
    await until_named(service, tmp_path, ["a", "b"])


async def test_a_shard_starts_while_its_archive_fails(tmp_path: Path) -> None:
    first = opened(tmp_path)
    TroubledFileSystem.fails = True
    await train(first, "a", "b")
    journals[0].store.close()
    second = opened(tmp_path)
    await train(second, "c", "d")
    TroubledFileSystem.fails = False
    await until_named(second, tmp_path, ["a", "b", "c", "d"])
