"""A shard forgets a person on a disk that has less free space than its journal takes, beside another shard's journal.

Then there is not even the space that a piece of the work needs, until some is freed.
"""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

from benchmarks.forgetting import MB, People
from benchmarks.survival.full_disk import SmallDisk, seconds_until, small_disk
from benchmarks.survival.row import RowOutcome
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.shard.service import ShardService
from stepwell.pool.shard.sqlite_journal import ROOM, SqliteJournal
from stepwell.pool.slices.forgetting import Forget
from stepwell.pool.slices.forgetting_work import Forgetting

JOURNAL_MB, QUICK_JOURNAL_MB = 300, 80
LITTLE = ROOM + 32 * 2**20
"""Bytes that are free when the first person is forgotten."""
TOO_LITTLE = ROOM // 2
FIRST, SECOND = "data_pool.sqlite", "data_pool-1.sqlite"
LOG = 60 * MB
WAITS = 3.0
"""Seconds without space."""
PLAN = PoolPlan(uid="5f0c", min_free_bytes=2**20)


class Shard:
    def __init__(self, path: Path) -> None:
        self.ended = 0
        self._journal = SqliteJournal(path, closed_kept=1_000)
        self.service = ShardService(PLAN, path.stem, journal=self._journal, on_journal_failure=self._end)
        self.service.pool.state.slice_of(Forgetting).retry_pause = 0.2

    async def fill(self, suffix: str, nbytes: int) -> People:
        """Until the journal's file with that suffix has so many bytes. A log does not grow beyond LOG."""
        people = People(self.service)
        while _size(f"{self._journal.file.path}{suffix}") < nbytes:
            await people.say(20)
        return people

    def reuse_log(self) -> None:
        """What comes now takes the place of what is in the log: the shard itself needs no more of the disk."""
        self._journal.file.db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        self._journal.store.close()

    def _end(self) -> None:
        self.ended += 1


class ForgettingOnSmallDisk:
    name = "disk_small_forget"
    fault = (
        "a shard forgets a person, and its disk, on which another shard's journal is, has less space than its journal"
    )

    async def run(self, *, quick: bool) -> RowOutcome:
        megabytes = QUICK_JOURNAL_MB if quick else JOURNAL_MB
        with small_disk(3 * megabytes + 200) as disk:
            a, b = Shard(disk.folder / FIRST), Shard(disk.folder / SECOND)
            await a.fill("", megabytes * MB)
            others = await b.fill("-wal", LOG)
            b.reuse_log()
            ballast = Ballast(disk)
            ballast.leave(LITTLE)
            talk = Talk(others, ballast)
            talking = asyncio.create_task(talk.run())
            receipt = await a.service.run_long(Forget("u7"))
            ballast.leave(TOO_LITTLE)
            waiting = asyncio.create_task(a.service.run_long(Forget("u8")))

            async def waits() -> bool:
                return bool((await a.service.stats()).removal_waits)

            told = await seconds_until(waits, 60.0)
            await asyncio.sleep(WAITS)
            is_early = waiting.done()
            ballast.leave(LITTLE)
            later = await waiting
            talk.is_over.set()
            await talking
            measured = {
                "journal_mb": round((disk.folder / FIRST).stat().st_size / MB),
                "free_mb": LITTLE // MB,
                "least_free_mb": round(talk.least_free / MB, 1),
                "forgotten": int(receipt.is_done) + int(later.is_done),
                "forgotten_without_space": int(is_early),
                "told_s": round(told, 1),
                "steps_refused": talk.refused,
                "steps_taken": talk.taken,
                "shards_ended": a.ended + b.ended,
            }
            a.close()
            b.close()
        nothing = dict.fromkeys(("forgotten_without_space", "steps_refused", "shards_ended"), 0)
        return RowOutcome(
            measured,
            nothing | {"told_s": 10.0},
            {"forgotten": 2, "least_free_mb": 1, "steps_taken": 20, "journal_mb": LITTLE // MB},
        )


class Ballast:
    """A file that takes the space of the disk."""

    def __init__(self, disk: SmallDisk) -> None:
        self._file = disk.folder / "ballast"
        self._file.touch()

    @property
    def free(self) -> int:
        disk = os.statvfs(self._file)
        return disk.f_bavail * disk.f_frsize

    def leave(self, free: int) -> None:
        size = self._file.stat().st_size + self.free - free
        with self._file.open("r+b") as file:
            file.truncate(0)
            file.write(bytes(size))


class Talk:
    """Steps that the other shard takes meanwhile."""

    def __init__(self, people: People, ballast: Ballast) -> None:
        self.taken = self.refused = 0
        self.least_free: float = ballast.free
        self.is_over = asyncio.Event()
        self._people = people
        self._ballast = ballast

    async def run(self) -> None:
        while not self.is_over.is_set():
            try:
                await self._people.say()
                self.taken += 1
            except PoolUnavailable:
                self.refused += 1
            self.least_free = min(self.least_free, self._ballast.free)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await self.is_over.wait()


def _size(file: str) -> int:
    return os.stat(file).st_size
