"""The spool: a copy on disk of the steps that a gateway holds for the pool, so that they outlive the gateway.

- `add` and `remove` never wait. The spool's own thread writes, some milliseconds of changes at a time.
- A step is on disk until it is removed. The steps that an earlier process left are sent again.
- A step that is released is on disk only, until it is recalled. So more steps can wait than fit into memory. Beyond
  `max_bytes`, released steps are given up.
- What the disk did not take is written as soon as it can be.

A kill -9 of the gateway costs the steps of the last milliseconds, which the thread has not written. A loss of power may
cost more, because the disk is not synced at every change. A step may be sent again after a kill; the pool takes it
once. While the disk fails, new steps are in memory only.
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeAlias

from stepwell.gateway.recording.spool_file import MAX_FOUND, SpoolFile
from stepwell.steps.columns import to_bytes
from stepwell.steps.step import Step

log = logging.getLogger("stepwell.gateway")

GATHER_SECONDS = 0.005
"""How long changes are gathered. A step that comes and goes within this time is never written."""
MAX_ROW = 64
"""Steps in one row. A row is deleted when its last step is removed."""
MAX_BYTES = 16 * 2**30
"""Bytes of packed steps on disk."""
RETRY_PAUSE = 1.0
"""Seconds until steps that the disk did not take are written again."""


class Change(Enum):
    ADD = "add"
    REMOVE = "remove"
    RELEASE = "release"


class SpoolChange(NamedTuple):
    steps: Sequence[Step]
    what: Change


class PoolClaim(NamedTuple):
    uid: str
    sets_apart: bool


class SpoolRecall(NamedTuple):
    nbytes: int
    deliver: Callable[[list[Step]], object]


class SpoolScrub(NamedTuple):
    deliver: Callable[[bool], object]


SpoolRequest: TypeAlias = SpoolChange | PoolClaim | SpoolRecall | SpoolScrub


class Spool:
    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, *, most_found: int = MAX_FOUND) -> None:
        """StepwellError if another process has the file open, or if it cannot be used. Of what an earlier process left,
        `most_found` bytes are read at once."""
        self.unwritten = 0
        """Steps that could not be written at once."""
        self.on_given_up: Callable[[list[str]], object] = lambda _: None
        """Called in the spool's thread with the trajectory of each released step that is not on disk."""
        self._max_bytes = max_bytes
        self._file = SpoolFile(path, most_found)
        self._changes: queue.SimpleQueue[SpoolRequest | None] = queue.SimpleQueue()
        self._rows: dict[Step, int] = {}
        """The row of each step."""
        self._left: dict[int, int] = {}
        """How many steps of a row are not removed."""
        self._spent: list[int] = []
        """Rows to delete."""
        self._unwritten: dict[Step, None] = {}
        """Steps that the disk has not taken yet."""
        self._retry_at = 0.0
        self._counted: set[Step] = set()
        """Those of them that are counted."""
        self._released = {row: dict(steps) for row, steps in self._file.unread.items()}
        """By row, oldest first: the trajectories of the steps that are on disk only, by the steps' uids."""
        for row, steps in self._file.found.items():
            self._keep(row, steps)
        for row, uids in self._file.unread.items():
            self._left[row] = len(uids)
        self._last_row = self._last_leftover = max(self._left, default=0)
        self._thread = threading.Thread(target=self._write_changes, name="stepwell-spool", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Steps in memory that the disk has not taken, and is to take as soon as it can."""
        return len(self._counted)

    @property
    def gateway(self) -> str:
        """The name by which the pool knows the gateway. It stays the same when the gateway is started again."""
        return self._file.gateway

    @property
    def found_on_disk(self) -> Counter[str]:
        """How many further steps an earlier process left, by trajectory. They are to be recalled."""
        return Counter(uid for uids in self._file.unread.values() for uid in uids.values())

    def take_leftovers(self) -> list[Step]:
        """The oldest steps that an earlier process did not send."""
        leftovers = [step for steps in self._file.found.values() for step in steps]
        self._file.found.clear()
        return leftovers

    def claim(self, pool_uid: str) -> bool:
        """The steps from now on are for this pool. False if those that an earlier process left are for another one:
        then they are set apart, and are no longer here."""
        is_own = self._file.pool_uid in ("", pool_uid)
        if pool_uid != self._file.pool_uid:
            self._changes.put(PoolClaim(pool_uid, not is_own))
        return is_own

    def add(self, steps: Sequence[Step]) -> None:
        self._changes.put(SpoolChange(steps, Change.ADD))

    def remove(self, steps: Sequence[Step]) -> None:
        """The steps were delivered or given up."""
        self._changes.put(SpoolChange(steps, Change.REMOVE))

    def release(self, steps: Sequence[Step]) -> None:
        """The steps are no longer in memory."""
        self._changes.put(SpoolChange(steps, Change.RELEASE))

    def recall(self, nbytes: int, deliver: Callable[[list[Step]], object]) -> None:
        """Read the oldest released steps, about so many bytes. `deliver` is called with them in the spool's thread."""
        self._changes.put(SpoolRecall(nbytes, deliver))

    def scrub(self, deliver: Callable[[bool], object] = lambda _: None) -> None:
        """Remove from the file what is left there of deleted steps. `deliver` is called in the spool's thread with
        whether that was done."""
        self._changes.put(SpoolScrub(deliver))

    def close(self) -> None:
        """Write the last changes and close the file."""
        self._changes.put(None)
        self._thread.join()
        self._file.close()

    def _write_changes(self) -> None:
        is_open = True
        while is_open:
            changes = self._await_changes()
            time.sleep(GATHER_SECONDS)
            while not self._changes.empty():
                changes.append(self._changes.get())
            is_open = None not in changes
            for change in changes:
                if isinstance(change, PoolClaim):
                    self._claim(change)
            made = [change for change in changes if isinstance(change, SpoolChange)]
            fresh = self._sort(made, is_last=not is_open)
            if self._spent and self._file.delete(self._spent):
                self._spent.clear()
            self._insert(fresh)
            self._release_steps([step for change in made if change.what is Change.RELEASE for step in change.steps])
            for change in changes:
                if isinstance(change, SpoolRecall):
                    change.deliver(self._read_released(change.nbytes))
            if scrubs := [change for change in changes if isinstance(change, SpoolScrub)]:
                is_clean = not self._spent and self._file.scrub()
                for scrub in scrubs:
                    scrub.deliver(is_clean)

    def _await_changes(self) -> list[SpoolRequest | None]:
        """None of them after a while if there is something to write again."""
        try:
            return [self._changes.get(timeout=RETRY_PAUSE if self._unwritten or self._spent else None)]
        except queue.Empty:
            return []

    def _claim(self, claim: PoolClaim) -> None:
        if claim.sets_apart and not self._file.set_apart(self._last_leftover):
            return  # what is written from now on is apart too when a gateway starts with this file again
        if claim.sets_apart:
            self._rows = {step: row for step, row in self._rows.items() if row > self._last_leftover}
            self._left = {row: left for row, left in self._left.items() if row > self._last_leftover}
            self._released = {row: kept for row, kept in self._released.items() if row > self._last_leftover}
        self._file.claim(claim.uid)

    def _sort(self, changes: Sequence[SpoolChange], *, is_last: bool) -> list[Step]:
        """Returns the steps to write. Rows without steps are added to `_spent`."""
        fresh: dict[Step, None] = {}
        if is_last or time.monotonic() >= self._retry_at:
            fresh, self._unwritten = self._unwritten, {}
        for steps, what in changes:
            if what is Change.ADD:
                fresh.update(dict.fromkeys(steps))
            elif what is Change.REMOVE:
                for step in steps:
                    if step in fresh:
                        del fresh[step]
                    elif step in self._unwritten:
                        del self._unwritten[step]
                    elif step in self._rows:
                        self._discard(self._rows.pop(step))
        return list(fresh)

    def _release_steps(self, steps: Sequence[Step]) -> None:
        given_up = []
        for step in steps:
            row = self._rows.pop(step, None)
            self._unwritten.pop(step, None)
            if row is not None and self._file.nbytes <= self._max_bytes:
                self._released.setdefault(row, {})[step.uid] = step.trajectory_uid
                continue
            given_up.append(step.trajectory_uid)
            if row is not None:
                self._discard(row)
        if given_up:
            self.on_given_up(given_up)

    def _read_released(self, nbytes: int) -> list[Step]:
        recalled: list[Step] = []
        while self._released and nbytes > 0:
            row = next(iter(self._released))
            wanted, (steps, size) = self._released.pop(row), self._file.read_row(row)
            found = [step for step in steps if wanted.pop(step.uid, None) is not None]
            self._rows.update(dict.fromkeys(found, row))
            recalled += found
            nbytes -= size
            if wanted:
                self.on_given_up(list(wanted.values()))
        return recalled

    def _insert(self, fresh: Sequence[Step]) -> None:
        for start in range(0, len(fresh), MAX_ROW):
            self._insert_row(fresh[start : start + MAX_ROW])
        self._counted = set(self._unwritten)

    def _insert_row(self, steps: Sequence[Step]) -> None:
        """A step that cannot be packed keeps no other from the disk."""
        try:
            packed = to_bytes(steps)
        except (TypeError, ValueError) as failure:
            if len(steps) == 1:
                self.unwritten += 1
                log.error("a step of trajectory %s cannot be in a spool: %s", steps[0].trajectory_uid, failure)
                return
            for step in steps:
                self._insert_row([step])
            return
        self._last_row += 1
        if self._file.insert(self._last_row, packed):
            self._keep(self._last_row, steps)
        else:
            self.unwritten += sum(step not in self._counted for step in steps)
            self._unwritten.update(dict.fromkeys(steps))
            self._retry_at = time.monotonic() + RETRY_PAUSE

    def _keep(self, row: int, steps: Sequence[Step]) -> None:
        self._rows.update(dict.fromkeys(steps, row))
        self._left[row] = len(steps)

    def _discard(self, row: int) -> None:
        self._left[row] -= 1
        if not self._left[row]:
            del self._left[row]
            self._spent.append(row)
