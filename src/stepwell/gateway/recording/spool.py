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
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeAlias

from stepwell.gateway.recording.spool_file import MAX_FOUND, SpoolFile
from stepwell.gateway.recording.step_book import HeldStep, steps_of
from stepwell.steps.columns import to_bytes

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
    steps: Sequence[HeldStep]
    what: Change


SpoolRequest: TypeAlias = SpoolChange | Callable[[], object] | None
"""A function is called in the spool's thread, after the changes that came with it. None: the last changes."""


class Spool:
    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, *, most_found: int = MAX_FOUND) -> None:
        """StepwellError if another process has the file open, or if it cannot be used. Of what an earlier process left,
        `most_found` bytes are read at once."""
        self.unwritten = 0
        """Steps that could not be written at once."""
        self.pending = 0
        """Steps in memory that the disk has not taken, and is to take as soon as it can."""
        self.on_given_up: Callable[[list[HeldStep]], object] = lambda _: None
        """Called in the spool's thread with the released steps that are not on disk."""
        self._max_bytes = max_bytes
        self._file = SpoolFile(path, most_found)
        self._requests: queue.SimpleQueue[SpoolRequest] = queue.SimpleQueue()
        self._left = {row: len(steps) for row, steps in self._file.found.items()}
        """How many steps of a row are not removed."""
        self._spent: list[int] = []
        """Rows to delete."""
        self._unwritten: dict[HeldStep, None] = {}
        """Steps that the disk has not taken yet."""
        self._retry_at = 0.0
        self._released = {row: steps[:] for row, steps in self._file.found.items() if steps[0].step is None}
        """The steps that are on disk only, by row, the oldest first."""
        self._scrubs: list[Callable[[bool], object]] = []
        """The callbacks of those who wait until the file is clean."""
        self._last_row = self._last_leftover = max(self._left, default=0)
        self._thread = threading.Thread(target=self._write_changes, name="stepwell-spool", daemon=True)
        self._thread.start()

    @property
    def gateway(self) -> str:
        """The name by which the pool knows the gateway. It stays the same when the gateway is started again."""
        return self._file.gateway

    def take_leftovers(self) -> list[HeldStep]:
        """The steps that an earlier process did not send, the oldest first. Some may be on disk only: they are to be
        recalled."""
        leftovers = [held for steps in self._file.found.values() for held in steps]
        self._file.found.clear()
        return leftovers

    def claim(self, pool_uid: str) -> bool:
        """The steps from now on are for this pool. False if those that an earlier process left are for another one:
        then they are set apart, and are no longer here."""
        is_own = self._file.pool_uid in ("", pool_uid)
        if pool_uid != self._file.pool_uid:
            self._requests.put(lambda: self._claim(pool_uid, sets_apart=not is_own))
        return is_own

    def add(self, steps: Sequence[HeldStep]) -> None:
        self._requests.put(SpoolChange(steps, Change.ADD))

    def remove(self, steps: Sequence[HeldStep]) -> None:
        """The steps were delivered or given up."""
        self._requests.put(SpoolChange(steps, Change.REMOVE))

    def release(self, steps: Sequence[HeldStep]) -> None:
        """The steps are to be on disk only."""
        self._requests.put(SpoolChange(steps, Change.RELEASE))

    def recall(self, nbytes: int, deliver: Callable[[list[HeldStep]], object]) -> None:
        """Read the oldest released steps, about so many bytes. `deliver` is called with them in the spool's thread."""
        self._requests.put(lambda: deliver(self._read_released(nbytes)))

    def scrub(self, deliver: Callable[[bool], object] = lambda _: None) -> None:
        """Remove from the file what is left there of deleted steps. `deliver` is called in the spool's thread with
        whether that was done."""
        self._requests.put(lambda: self._scrubs.append(deliver))

    def close(self) -> None:
        """Write the last changes and close the file."""
        self._requests.put(None)
        self._thread.join()
        self._file.close()

    def _write_changes(self) -> None:
        is_open = True
        while is_open:
            requests = self._await_requests()
            time.sleep(GATHER_SECONDS)
            while not self._requests.empty():
                requests.append(self._requests.get())
            is_open = None not in requests
            changes = [request for request in requests if isinstance(request, SpoolChange)]
            fresh = self._sort(changes, is_last=not is_open)
            if self._spent and self._file.delete(self._spent):
                self._spent.clear()
            for start in range(0, len(fresh), MAX_ROW):
                self._insert_row(fresh[start : start + MAX_ROW])
            self.pending = len(self._unwritten)
            self._release_steps([held for change in changes if change.what is Change.RELEASE for held in change.steps])
            for request in requests:
                if callable(request):
                    request()
            if self._scrubs:
                scrubs, self._scrubs = self._scrubs, []
                is_clean = not self._spent and self._file.scrub()
                for deliver in scrubs:
                    deliver(is_clean)

    def _await_requests(self) -> list[SpoolRequest]:
        """None of them after a while if there is something to write again."""
        try:
            return [self._requests.get(timeout=RETRY_PAUSE if self._unwritten or self._spent else None)]
        except queue.Empty:
            return []

    def _claim(self, pool_uid: str, *, sets_apart: bool) -> None:
        if sets_apart and not self._file.set_apart(self._last_leftover):
            return  # what is written from now on is apart too when a gateway starts with this file again
        if sets_apart:
            self._left = {row: left for row, left in self._left.items() if row > self._last_leftover}
            self._released = {row: kept for row, kept in self._released.items() if row > self._last_leftover}
        self._file.claim(pool_uid)

    def _sort(self, changes: Sequence[SpoolChange], *, is_last: bool) -> list[HeldStep]:
        """Returns the steps to write. Rows without steps are added to `_spent`."""
        fresh: dict[HeldStep, None] = {}
        if is_last or time.monotonic() >= self._retry_at:
            fresh, self._unwritten = self._unwritten, {}
        for steps, what in changes:
            if what is Change.ADD:
                fresh.update(dict.fromkeys(steps))
            elif what is Change.REMOVE:
                for held in steps:
                    if held in fresh:
                        del fresh[held]
                    elif held in self._unwritten:
                        del self._unwritten[held]
                    else:
                        self._discard(held)
        return list(fresh)

    def _release_steps(self, steps: Sequence[HeldStep]) -> None:
        given_up = []
        for held in steps:
            self._unwritten.pop(held, None)
            if held.row in self._left and self._file.nbytes <= self._max_bytes:
                self._released.setdefault(held.row, []).append(held)
                held.step = None
            else:
                given_up.append(held)
                self._discard(held)
        if given_up:
            self.on_given_up(given_up)

    def _read_released(self, nbytes: int) -> list[HeldStep]:
        recalled: list[HeldStep] = []
        while self._released and nbytes > 0:
            row = next(iter(self._released))
            wanted, (steps, size) = self._released.pop(row), self._file.read_row(row)
            found = {step.uid: step for step in steps}
            for held in wanted:
                held.step = found.get(held.uid)
            recalled += [held for held in wanted if held.step is not None]
            nbytes -= size
            if missing := [held for held in wanted if held.step is None]:
                self.on_given_up(missing)
        return recalled

    def _insert_row(self, steps: Sequence[HeldStep]) -> None:
        """A step that cannot be packed keeps no other from the disk."""
        try:
            packed = to_bytes(steps_of(steps))
        except (TypeError, ValueError) as failure:
            if len(steps) == 1:
                self.unwritten += 1
                log.error("a step of trajectory %s cannot be in a spool: %s", steps[0].trajectory_uid, failure)
                return
            for held in steps:
                self._insert_row([held])
            return
        self._last_row += 1
        if self._file.insert(self._last_row, packed):
            self._left[self._last_row] = len(steps)
            for held in steps:
                held.row = self._last_row
            return
        for held in steps:
            self.unwritten += not held.is_late
            held.is_late = True
            self._unwritten[held] = None
        self._retry_at = time.monotonic() + RETRY_PAUSE

    def _discard(self, held: HeldStep) -> None:
        """A step of a row, if it is in one, is no longer needed there."""
        row, held.row = held.row, 0
        if row in self._left:
            self._left[row] -= 1
            if not self._left[row]:
                del self._left[row]
                self._spent.append(row)
