"""A shard removes data for good: a note first, then steps that can each be repeated.

1. `note`: the tombstone. From here on nothing of the subject is taken. Then it leaves the pool's state, some
   trajectories at a time.
2. `gateways`: those that live send what they hold, which is refused, and clean their spools.
3. `waiting`: groups on their way to the archive.
4. `archive`: the files of this shard are written again without the subject.
5. `names`: what slices have about its trajectories, and late rewards, in the journal and in the archive.
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
from dataclasses import replace
from math import inf
from typing import Any

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.producing import SCRUB_SPOOL
from stepwell.pool.api.stats import PoolStats
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.archive_files import FOLDER, FOUND, ArchiveFiles, FoundRows, versions_with
from stepwell.pool.shard.archive_files import FOLDER as LINEAGE
from stepwell.pool.shard.shard import Shard
from stepwell.pool.slices.forgetting import FORGETTING, Overdue, Removal, RowTest, ShardReceipt, note_overdue
from stepwell.pool.state.journal import StateJournal
from stepwell.pool.state.slice import Slice
from stepwell.pool.state.tombstones import OLDER_THAN, Tombstone, names_of
from stepwell.steps.groups import first_version, lineage_name

log = logging.getLogger("stepwell.pool")

GATEWAY_WAIT = 20.0
"""Seconds in which gateways clean their spools. Those that do not are named in the receipt."""
LOOK_INTERVAL = 0.05
RETRY_PAUSE = 5.0
"""Seconds until a step that failed is tried again."""
RETENTION_INTERVAL = 3600.0
"""Seconds. Data is removed so much later than it is due, at most."""
ARCHIVE_QUEUE, ARCHIVE = "archive queue", "archive"


class Forgetting(Slice):
    """What is to be removed from one shard, one subject after the other. What it has to remember is in tombstones."""

    name = FORGETTING
    _shard: Shard

    def __init__(self, journal: StateJournal) -> None:
        super().__init__(journal)
        self.before_step: Callable[[str], None] = lambda _: None
        """Called with the name of each step before it begins. Tests kill the process there."""
        self.gateway_wait = GATEWAY_WAIT
        self.retry_pause = RETRY_PAUSE
        self.retention_interval = RETENTION_INTERVAL
        self.watching: asyncio.Task[None] | None = None
        """Removes what is too old at once, and then after each interval."""
        self.waits_for = ""
        """Why what is to be removed cannot be removed now; empty if nothing hinders it."""
        self.overdue = Overdue()
        """What the last run for what is too old has left because the pool has not run for so long."""
        self._scrubbed: set[str] = set()
        """The gateways that have cleaned their spools since they were asked."""
        self._working: asyncio.Task[None] | None = None
        self._next_due: dict[str, float] = {}
        """By file of the archive: until when nothing in it is too old."""
        self._kept_back: dict[str, Mapping[str, float]] = {}
        """By file: when trajectories began that are too old by the wall clock alone."""

    def attach(self, shard: Shard) -> None:
        self._shard = shard
        self._transactions = shard.transactions
        self._state = shard.pool.state
        self._gateways = shard.gateways
        shard.transactions.before_commit.extend((self.resume, self._watch_retention))
        shard.on_flushed.append(self._note_scrubbed)
        shard.on_stats.append(self._add_stats)

    async def forget(self, subject: str, also: Sequence[str] = ()) -> ShardReceipt:
        """Returns when all is removed. `also` are hashes of names that other shards found."""
        async with self._transactions.transaction():
            tombstone = self._state.refuse_subject(self._state.tombstones.digest(subject), self._transactions.clock())
            if self._state.refuse_names(also):
                tombstone.is_done = False
        return await self._carry_out(tombstone)

    async def forget_overdue(self, seconds: float | None, *, by_clock: bool) -> ShardReceipt:
        """What is older than that, or than its own retention, whatever the pool's is. Returns when all is removed.

        Without `by_clock`, only what has been here for as long while the pool ran: the clock may be wrong."""
        async with self._transactions.transaction():
            tombstone = note_overdue(self._state, seconds, self._transactions.clock(), by_clock=by_clock)
        receipt = await self._carry_out(tombstone)
        self._note_kept_back(tombstone)
        return receipt

    async def enforce_retention(self) -> Overdue:
        """Remove what is older than the pool keeps data. Returns what is kept all the same."""
        await self.forget_overdue(self._state.limits.retention, by_clock=False)
        return self.overdue

    async def forget_kept_back(self) -> ShardReceipt:
        """The wall clock is right, and the pool was off: what the retention keeps because of that is removed too."""
        async with self._transactions.transaction():
            self._state.tombstones.running.trust_clock()
        return await self.forget_overdue(self._state.limits.retention, by_clock=True)

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

    # -- what the shard calls ------------------------------------------------------------------------------------------

    def _note_scrubbed(self, gateway: str, trajectory_uids: Sequence[str]) -> None:
        if SCRUB_SPOOL in trajectory_uids:
            self._scrubbed.add(gateway)

    def _add_stats(self, stats: PoolStats) -> PoolStats:
        return replace(stats, removal_waits=int(bool(self.waits_for)), overdue_by_clock=self.overdue.count)

    def _watch_retention(self) -> None:
        is_limited = self._state.limits.retention is not None or self._state.has_retention
        if is_limited and (self.watching is None or self.watching.done()):
            self.watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            try:
                await self.enforce_retention()
            except PoolUnavailable:  # the shard answers nothing any more
                return
            await asyncio.sleep(self.retention_interval)

    # -- the steps -----------------------------------------------------------------------------------------------------

    async def _carry_out(self, tombstone: Tombstone) -> ShardReceipt:
        await self._remove_held(Removal(tombstone, self._state))
        self.resume()
        while not tombstone.is_done and self._working is not None:
            await asyncio.shield(self._working)
        return self.receipt(tombstone)

    async def _remove_held(self, removal: Removal) -> None:
        """Some at a time, so that other calls need not wait. Watchers read everything again if something is gone that
        they may know."""
        pieces = removal.remove_held()
        more = True
        while more:
            async with self._transactions.transaction():
                more = next(pieces, pieces) is not pieces
        if removal.has_removed or not removal.is_of_age:
            self._shard.renew_watch_epoch()

    def _note_kept_back(self, tombstone: Tombstone) -> None:
        held = [found.born for found in Removal(tombstone, self._state).kept_back()]
        archived = {uid: born for file in self._kept_back.values() for uid, born in file.items()}
        since = min((*held, *archived.values()), default=inf)
        was_told, name = self.overdue.count > 0, self._transactions.name
        self.overdue = Overdue(
            shard=name, clock=tombstone.at, trajectories=len(held), archived=len(archived), since=since
        )
        if self.overdue.count and not was_told:
            log.error(
                "shard %s keeps %d trajectories that are too old by the clock: the pool has not run for so long since "
                "they came. If the clock is right, and the pool was off: stepwell forget --overdue",
                *(name, self.overdue.count),
            )

    async def _work(self) -> None:
        await self._transactions.commit()
        while unfinished := self._state.tombstones.unfinished:
            try:
                await self._finish(Removal(unfinished[0], self._state))
            except Exception as failure:  # noqa: BLE001 - whatever it is, it is tried again until it is done
                await self._wait(str(failure) or repr(failure))
            else:
                self.waits_for = ""

    async def _finish(self, removal: Removal) -> None:
        await self._remove_held(removal)
        self.before_step("gateways")
        await self._clean_gateways(removal)
        archive = self._transactions.archive
        if archive is not None:
            archive.is_paused = True
        try:
            if archive is not None:
                await self._remove_waiting(removal, archive)
                await self._rewrite_files(removal, archive, "")
            await self._remove_named(removal)
            if archive is not None:
                await self._rewrite_files(removal, archive, FOLDER)
                await self._find_versions(removal, archive)
        finally:
            if archive is not None:
                archive.is_paused = False
        if removal.has_removed or not removal.is_of_age:
            self.before_step("scrub")
            await self._scrub(removal)
        self.before_step("done")
        removal.tombstone.is_done = True
        await self._save_progress(removal)
        self.before_step("end")
        log.info("shard %s has removed the data of: %s", self._transactions.name, removal.tombstone.subject)

    async def _clean_gateways(self, removal: Removal) -> None:
        """A gateway that does not answer cleans its spool later: when the pool refuses what it holds."""
        asked = set(self._gateways.living())
        self._scrubbed.clear()
        deadline = self._transactions.monotonic() + self.gateway_wait
        while (left := (asked & set(self._gateways.living())) - self._scrubbed) and (
            self._transactions.monotonic() < deadline
        ):
            for gateway in left:
                self._gateways.ask(gateway, SCRUB_SPOOL)
            await self._gateways.wait(self._transactions.recheck_interval)
        if asked:
            removal.add_listed("gateways", self._scrubbed & asked)
            removal.add_listed("silent_gateways", asked - self._scrubbed)

    async def _remove_waiting(self, removal: Removal, archive: ParquetArchive) -> None:
        """Groups that are trained and not yet in a file. Before, all files that were begun are completed."""
        self.before_step("waiting")
        archive.poll()
        while not archive.is_at_rest:
            await asyncio.sleep(LOOK_INTERVAL)
            archive.poll()
        for trajectory in archive.remove_waiting(removal.covers_trajectory):
            removal.note(trajectory, ARCHIVE_QUEUE)
        await self._save_progress(removal)

    async def _rewrite_files(self, removal: Removal, archive: ParquetArchive, folder: str) -> None:
        """The archive's groups, or its late rewards."""
        self.before_step(f"archive {folder}".strip())
        fs, root = archive.place
        files = ArchiveFiles(fs, f"{root}/{folder}".rstrip("/"), self._is_own)
        await asyncio.to_thread(files.remove_leftovers)
        if removal.is_of_age and not folder:
            self._kept_back.clear()
        is_usual = removal.is_of_age and removal.tombstone.removed[OLDER_THAN] == self._state.limits.retention
        for file in await asyncio.to_thread(files.files):
            # For the pool's own retention, what the last run has learned of the file holds.
            if is_usual and self._next_due.get(file, 0.0) > removal.tombstone.at:
                continue
            rows = RowTest(removal.tombstone, self._state.tombstones)
            found = await asyncio.to_thread(files.find, file, rows.is_removed)
            if removal.is_of_age and not folder:
                self._kept_back[file] = rows.kept_back
            if found is not None:
                await self._rewrite(removal, files, found, folder)
            elif not folder and is_usual:
                self._next_due[file] = rows.next_due

    async def _rewrite(self, removal: Removal, files: ArchiveFiles, found: FoundRows, folder: str) -> None:
        """The receipt has the file before it is replaced."""
        await asyncio.to_thread(files.check_room, found.file)
        before = await asyncio.to_thread(files.digest, found.file)
        is_written = await asyncio.to_thread(files.write_without, found)
        after = await asyncio.to_thread(files.digest, f"{found.file}.part") if is_written else ""
        name = "/".join(filter(None, (folder, found.file.rpartition("/")[2])))
        listed = {"rows": found.rows, "sha256_before": before, "sha256_after": after}
        removal.tombstone.removed.setdefault("files", {})[name] = listed
        self._note_names(removal, found)
        await self._save_progress(removal)
        self.before_step(f"replace {folder}".strip())
        await asyncio.to_thread(files.replace, found, is_written)

    def _note_names(self, removal: Removal, found: FoundRows) -> None:
        removal.refuse([name for pair in found.names for name in names_of(*pair)])
        removal.add_listed("lineage", [lineage_name(uid) for uid, _ in found.names])
        listed: dict[str, Any] = removal.tombstone.removed.setdefault("trajectories", {})
        for uid, (steps, tokens) in found.tokens.items():
            listed[self._state.tombstones.digest(uid)] = {"where": ARCHIVE, "steps": steps, "tokens": tokens}

    async def _remove_named(self, removal: Removal) -> None:
        """What is about its trajectories, and names them: rows of slices, and late rewards."""
        self.before_step("names")
        journal = self._transactions.journal
        await self._remove_held(removal)
        async with self._transactions.transaction():
            removal.remove_from_slices()
        if journal is None:
            return
        removal.count("late_rewards", journal.remove_late_named(removal.covers_record))
        await self._save_progress(removal)
        if self._transactions.archive is not None:
            self._transactions.archive.recount_late_rewards()

    async def _find_versions(self, removal: Removal, archive: ParquetArchive) -> None:
        """Which versions of the policy were trained on it. The lineage has no names, so it stays as it is."""
        journal, names = self._transactions.journal, set(removal.tombstone.removed.get("lineage", ()))
        if journal is None or not names:
            return
        fs, root = archive.place
        tables = ArchiveFiles(fs, f"{root}/{LINEAGE}").tables(FOUND)
        rows = [row for _, row in journal.lineage()]
        under, told = await asyncio.to_thread(versions_with, names, rows, tables)
        removal.add_listed("versions", [first_version(told, version) for version in under])
        await self._save_progress(removal)

    async def _scrub(self, removal: Removal) -> None:
        if self._transactions.journal is None:
            return
        aside = await self._transactions.journal.store.scrub(self._wait)
        self.waits_for = ""
        if aside:
            removal.add_listed("set_aside", aside)

    async def _wait(self, why: str) -> None:
        """Operators hear it once, in the log, and see it in the shard's statistics."""
        if why != self.waits_for:
            log.error("data is not yet removed from shard %s: %s", self._transactions.name, why)
        self.waits_for = why
        await asyncio.sleep(self.retry_pause)

    async def _save_progress(self, removal: Removal) -> None:
        async with self._transactions.transaction():
            removal.save()

    def _is_own(self, shard: str) -> bool:
        """The first shard has also the files of shards that are gone."""
        name, plan = self._transactions.name, self._transactions.plan
        if shard == name or name != plan.name:
            return shard == name
        is_of_pool = re.fullmatch(rf"{re.escape(plan.name)}(-\d+)?", shard) is not None
        return is_of_pool and shard not in plan.shard_names()
