"""The right to be forgotten, in one shard: a note first, then steps that can each be repeated.

1. `note`: the tombstone. From here on nothing of the subject is taken. Then it leaves the pool's state, some
   trajectories at a time.
2. `gateways`: those that live send what they hold, which is refused, and clean their spools.
3. `waiting`: groups on their way to the archive.
4. `archive`: the files of this shard are written again without the subject.
5. `names`: late rewards and audit entries about its trajectories, in the journal and in the archive.
6. `scrub`: the journal's files, which still have what deleted rows left there.
7. `done` is written into the tombstone.

A shard that is killed goes on when it runs again. It does not need the subject's name for that, only its hash.

What is too old is removed by the same steps; later data of the same names is taken. If nothing was found, the journal
is not scrubbed.
"""

import asyncio
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from stepwell.pool.api.forgetting import ForgottenSubject, Overdue, ShardReceipt
from stepwell.pool.api.producing import SCRUB_SPOOL
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.archive_files import ArchivedRow, ArchiveFiles, FoundRows
from stepwell.pool.shard.gateway_roster import GatewayRoster
from stepwell.pool.shard.late_rewards import FOLDER
from stepwell.pool.shard.lineage import FOLDER as LINEAGE
from stepwell.pool.shard.lineage import FOUND, versions_with
from stepwell.pool.shard.transactions import ShardTransactions
from stepwell.pool.state.forget_operations import add_listed, count_removed
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.tombstones import OLDER_THAN, Tombstone, Tombstones, names_of
from stepwell.steps.digest import first_version, lineage_name

log = logging.getLogger("stepwell.pool")

GATEWAY_WAIT = 20.0
"""Seconds in which gateways clean their spools. Those that do not are named in the receipt."""
LOOK_INTERVAL = 0.05
RETRY_PAUSE = 5.0
"""Seconds until a step that failed is tried again."""
LATE = 86_400.0
"""Seconds for which data may be too old by the wall clock alone until operators are told. Restarts take less."""
ARCHIVE_QUEUE, ARCHIVE = "archive queue", "archive"


class RowTest:
    """Which rows of a file a tombstone removes."""

    def __init__(self, tombstone: Tombstone, tombstones: Tombstones) -> None:
        self.next_due = inf
        """When the first of the rows so far is too old."""
        self.kept_back: dict[str, float] = {}
        """When trajectories began that are too old by the wall clock alone."""
        self._tombstone = tombstone
        self._tombstones = tombstones
        self._is_named = tombstones.named_by(tombstone)

    def is_removed(self, row: ArchivedRow) -> bool:
        is_named = self._is_named(row.trajectory_uid, row.prompt_uid)
        if not self._tombstone.is_of_age:
            return is_named or self._tombstones.is_of(self._tombstone.subject, row.metadata)
        due = self._tombstone.due_at(row.at, row.metadata)
        self.next_due = min(self.next_due, due)
        if is_named or self._tombstones.is_due(self._tombstone, row.at, row.metadata, row.arrived):
            return True
        if due + LATE < self._tombstone.at:
            self.kept_back[row.trajectory_uid] = min(row.at, self.kept_back.get(row.trajectory_uid, inf))
        return False


class Forgetting:
    """What is to be forgotten in one shard, one subject after the other."""

    def __init__(self, transactions: ShardTransactions, gateways: GatewayRoster) -> None:
        self.before_step: Callable[[str], None] = lambda _: None
        """Called with the name of each step before it begins. Tests kill the process there."""
        self.on_removed: Callable[[], None] = lambda: None
        """Called when something has left the state that watchers may know."""
        self.gateway_wait = GATEWAY_WAIT
        self.retry_pause = RETRY_PAUSE
        self.scrubbed: set[str] = set()
        """The gateways that have cleaned their spools since they were asked."""
        self.waits_for = ""
        """Why what is to be removed cannot be removed now; empty if nothing hinders it."""
        self._transactions = transactions
        self._state = transactions.pool.state
        self._gateways = gateways
        self._working: asyncio.Task[None] | None = None
        self._next_due: dict[str, float] = {}
        """By file of the archive: until when nothing in it is too old."""
        self._kept_back: dict[str, Mapping[str, float]] = {}
        """By file: when trajectories began that are too old by the wall clock alone."""
        self.overdue = Overdue()
        """What the last run for what is too old has left because of that."""

    async def forget(self, subject: str, also: Sequence[str] = ()) -> ShardReceipt:
        """Returns when all is removed. `also` are hashes of names that other shards found."""
        digest = self._state.tombstones.digest(subject)
        async with self._transactions.transaction():
            tombstone = self._state.note_forgotten(digest, self._transactions.clock())
            if self._state.add_forgotten_names(also):
                tombstone.is_done = False
        await self._forget_held(tombstone)
        return await self._finished(tombstone)

    async def forget_overdue(self, seconds: float | None, *, by_clock: bool) -> ShardReceipt:
        """What is older than that, or than its own retention, whatever the pool's is. Returns when all is removed.

        Without `by_clock`, only what has been here for as long while the pool ran: the clock may be wrong."""
        async with self._transactions.transaction():
            tombstone = self._state.note_overdue(seconds, self._transactions.clock(), by_clock=by_clock)
        await self._forget_held(tombstone)
        receipt = await self._finished(tombstone)
        self._note_kept_back(tombstone)
        return receipt

    def _note_kept_back(self, tombstone: Tombstone) -> None:
        held = [found.born for found in self._state.kept_back(tombstone, LATE)]
        archived = {uid: born for file in self._kept_back.values() for uid, born in file.items()}
        before, self.overdue = (
            self.overdue,
            Overdue(
                shard=self._transactions.name,
                clock=tombstone.at,
                trajectories=len(held),
                archived=len(archived),
                since=min((*held, *archived.values()), default=inf),
            ),
        )
        if self.overdue.count and not before.count:
            log.error(
                "shard %s keeps %d trajectories that are too old by the clock: the pool has not run for so long since "
                "they came. If the clock is right, and the pool was off: stepwell forget --overdue",
                *(self._transactions.name, self.overdue.count),
            )

    async def _finished(self, tombstone: Tombstone) -> ShardReceipt:
        self.resume()
        while not tombstone.is_done and self._working is not None:
            await asyncio.shield(self._working)
        return self.receipt(tombstone)

    async def _forget_held(self, tombstone: Tombstone) -> None:
        """Some at a time, so that other calls need not wait. Watchers read everything again if something is gone that
        they may know."""
        pieces = self._state.forget_held(tombstone)
        more = True
        while more:
            async with self._transactions.transaction():
                more = next(pieces, pieces) is not pieces
        if tombstone.has_removed or not tombstone.is_of_age:
            self.on_removed()

    def receipt(self, tombstone: Tombstone) -> ShardReceipt:
        return ShardReceipt(
            shard=self._transactions.name,
            subject=tombstone.subject,
            asked_at=tombstone.at,
            is_done=tombstone.is_done,
            removed=json.loads(json.dumps(tombstone.removed)),
            names=() if tombstone.is_of_age else sorted(self._state.tombstones.names),
        )

    def resume(self) -> None:
        """Go on with what is not done, in the background."""
        if self._state.tombstones.unfinished and (self._working is None or self._working.done()):
            self._working = asyncio.get_running_loop().create_task(self._work())

    def subjects(self) -> list[ForgottenSubject]:
        found = [tombstone for tombstone in self._state.tombstones.subjects.values() if not tombstone.is_of_age]
        return [ForgottenSubject(subject=tombstone.subject, asked_at=tombstone.at) for tombstone in found]

    async def adopt(self, subjects: Sequence[ForgottenSubject]) -> None:
        """Those that the other shards of the pool know."""
        async with self._transactions.transaction():
            for one in subjects:
                self._state.note_forgotten(one.subject, one.asked_at)
        self.resume()

    async def _work(self) -> None:
        await self._transactions.commit()
        while unfinished := self._state.tombstones.unfinished:
            try:
                await self._finish(unfinished[0])
            except Exception as failure:  # noqa: BLE001 - whatever it is, it is tried again until it is done
                await self._wait(str(failure) or repr(failure))
            else:
                self.waits_for = ""

    async def _finish(self, tombstone: Tombstone) -> None:
        await self._forget_held(tombstone)
        self.before_step("gateways")
        await self._clean_gateways(tombstone)
        archive = self._transactions.archive
        if archive is not None:
            archive.is_paused = True
        try:
            if archive is not None:
                await self._remove_waiting(tombstone, archive)
                await self._rewrite_files(tombstone, archive, "")
            await self._remove_named(tombstone)
            if archive is not None:
                await self._rewrite_files(tombstone, archive, FOLDER)
                await self._find_versions(tombstone, archive)
        finally:
            if archive is not None:
                archive.is_paused = False
        if tombstone.has_removed or not tombstone.is_of_age:
            self.before_step("scrub")
            await self._scrub(tombstone)
        self.before_step("done")
        tombstone.is_done = True
        await self._save(tombstone)
        self.before_step("end")
        log.info("shard %s has removed the data of: %s", self._transactions.name, tombstone.subject)

    async def _clean_gateways(self, tombstone: Tombstone) -> None:
        """A gateway that does not answer cleans its spool later: when the pool refuses what it holds."""
        asked = set(self._gateways.living())
        self.scrubbed.clear()
        deadline = self._transactions.monotonic() + self.gateway_wait
        while (left := (asked & set(self._gateways.living())) - self.scrubbed) and (
            self._transactions.monotonic() < deadline
        ):
            for gateway in left:
                self._gateways.ask(gateway, SCRUB_SPOOL)
            await self._gateways.wait(self._transactions.recheck_interval)
        if asked:
            add_listed(tombstone, "gateways", self.scrubbed & asked)
            add_listed(tombstone, "silent_gateways", asked - self.scrubbed)

    async def _remove_waiting(self, tombstone: Tombstone, archive: ParquetArchive) -> None:
        """Groups that are trained and not yet in a file. Before, all files that were begun are completed."""
        self.before_step("waiting")
        archive.poll()
        while not archive.is_at_rest:
            await asyncio.sleep(LOOK_INTERVAL)
            archive.poll()

        def is_of(trajectory: Trajectory) -> bool:
            if not self._state.is_covered(tombstone, trajectory):
                return False
            self._state.note_removed(tombstone, trajectory, ARCHIVE_QUEUE)
            return True

        archive.remove_waiting(is_of)
        await self._save(tombstone)

    async def _rewrite_files(self, tombstone: Tombstone, archive: ParquetArchive, folder: str) -> None:
        """The archive's groups, or its late rewards."""
        self.before_step(f"archive {folder}".strip())
        fs, root = archive.place
        files = ArchiveFiles(fs, f"{root}/{folder}".rstrip("/"), self._is_own)
        await asyncio.to_thread(files.remove_leftovers)
        if tombstone.is_of_age and not folder:
            self._kept_back.clear()
        for file in await asyncio.to_thread(files.files):
            if self._next_due.get(file, 0.0) > tombstone.at and self._is_usual(tombstone):
                continue
            rows = RowTest(tombstone, self._state.tombstones)
            found = await asyncio.to_thread(files.find, file, rows.is_removed)
            if tombstone.is_of_age and not folder:
                self._kept_back[file] = rows.kept_back
            if found is not None:
                await self._rewrite(tombstone, files, found, folder)
            elif not folder and self._is_usual(tombstone):
                self._next_due[file] = rows.next_due

    async def _rewrite(self, tombstone: Tombstone, files: ArchiveFiles, found: FoundRows, folder: str) -> None:
        """The receipt has the file before it is replaced."""
        await asyncio.to_thread(files.check_room, found.file)
        before = await asyncio.to_thread(files.digest, found.file)
        is_written = await asyncio.to_thread(files.write_without, found)
        after = await asyncio.to_thread(files.digest, f"{found.file}.part") if is_written else ""
        name = "/".join(filter(None, (folder, found.file.rpartition("/")[2])))
        listed = {"rows": found.rows, "sha256_before": before, "sha256_after": after}
        tombstone.removed.setdefault("files", {})[name] = listed
        self._note_names(tombstone, found)
        await self._save(tombstone)
        self.before_step(f"replace {folder}".strip())
        await asyncio.to_thread(files.replace, found, is_written)

    def _note_names(self, tombstone: Tombstone, found: FoundRows) -> None:
        tombstones = self._state.tombstones
        if not tombstone.is_of_age:
            names = [name for pair in found.names for name in names_of(*pair)]
            self._state.add_forgotten_names(tombstones.new_names(names))
        add_listed(tombstone, "lineage", [lineage_name(uid) for uid, _ in found.names])
        listed: dict[str, Any] = tombstone.removed.setdefault("trajectories", {})
        for uid, (steps, tokens) in found.tokens.items():
            listed[tombstones.digest(uid)] = {"where": ARCHIVE, "steps": steps, "tokens": tokens}

    async def _remove_named(self, tombstone: Tombstone) -> None:
        """What is about its trajectories, and names them: late rewards, and the rows of slices."""
        self.before_step("names")
        journal, is_about = self._transactions.journal, self._record_test(tombstone)
        await self._forget_held(tombstone)
        async with self._transactions.transaction():
            self._state.forget_in_slices(tombstone, is_about)
        if journal is None:
            return
        if count := journal.forget_late_named(is_about):
            count_removed(tombstone, "late_rewards", count)
        await self._save(tombstone)
        if self._transactions.archive is not None:
            self._transactions.archive.recount_late_rewards()

    async def _find_versions(self, tombstone: Tombstone, archive: ParquetArchive) -> None:
        """Which versions of the policy were trained on it. The lineage has no names, so it stays as it is."""
        journal, names = self._transactions.journal, set(tombstone.removed.get("lineage", ()))
        if journal is None or not names:
            return
        fs, root = archive.place
        tables = ArchiveFiles(fs, f"{root}/{LINEAGE}").tables(FOUND)
        rows = [row for _, row in journal.lineage()]
        under, told = await asyncio.to_thread(versions_with, names, rows, tables)
        add_listed(tombstone, "versions", [first_version(told, version) for version in under])
        await self._save(tombstone)

    async def _scrub(self, tombstone: Tombstone) -> None:
        if self._transactions.journal is None:
            return
        aside = await self._transactions.journal.store.scrub(self._wait)
        self.waits_for = ""
        if aside:
            add_listed(tombstone, "set_aside", aside)

    async def _wait(self, why: str) -> None:
        """Operators hear it once, in the log, and see it in the shard's statistics."""
        if why != self.waits_for:
            log.error("data is not yet removed from shard %s: %s", self._transactions.name, why)
        self.waits_for = why
        await asyncio.sleep(self.retry_pause)

    async def _save(self, tombstone: Tombstone) -> None:
        async with self._transactions.transaction():
            self._state.save_tombstone(tombstone)

    def _record_test(self, tombstone: Tombstone) -> Callable[[str, str, float], bool]:
        """Is a late reward, or a person's decision, to be removed that is about this trajectory and of that time?"""
        is_named = self._state.tombstones.named_by(tombstone)

        def is_about(trajectory_uid: str, prompt_uid: str, at: float) -> bool:
            return is_named(trajectory_uid, prompt_uid) or (
                tombstone.is_of_age and self._state.tombstones.is_due(tombstone, at, {})
            )

        return is_about

    def _is_usual(self, tombstone: Tombstone) -> bool:
        """Is it for what is older than the pool keeps data? Then what is known of its files from the last run holds."""
        return tombstone.is_of_age and tombstone.removed[OLDER_THAN] == self._state.limits.retention

    def _is_own(self, shard: str) -> bool:
        """The first shard has also the files of shards that are gone."""
        name, plan = self._transactions.name, self._transactions.plan
        if shard == name or name != plan.name:
            return shard == name
        is_of_pool = re.fullmatch(rf"{re.escape(plan.name)}(-\d+)?", shard) is not None
        return is_of_pool and shard not in plan.shard_names()
