"""The spool: what a gateway holds for the pool, on disk, so that it outlives the gateway.

What always holds: `add` and `remove` never wait, a thread of the spool's own does the writing, some milliseconds of
changes at a time; a step is on disk until it is removed; what an earlier process left is there to be delivered.

What a kill -9 of the gateway costs: the steps of the last milliseconds, which the thread had not written yet. A loss of
power may cost more, for the disk is not synced at every change. A step may be delivered again after a kill, and the
pool takes it once. A disk that fails costs the copy, not the recording.
"""

import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from stepwell.gateway.recording.spool_file import SpoolFile
from stepwell.steps.step import Step

GATHERING = 0.005
"""Seconds of changes that are written together. A step that comes and goes within is never written."""
MAX_ROW = 64
"""Steps in one row, which goes when the last of them goes."""


class Change(NamedTuple):
    steps: Sequence[Step]
    is_new: bool


class Spool:
    def __init__(self, path: Path) -> None:
        """StepwellError if another process has it, or it cannot be used. A damaged one is set aside."""
        self.unwritten = 0
        """Steps that the disk did not take."""
        self._file = SpoolFile(path)
        self._changes: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._rows: dict[Step, int] = {}
        """Where a step is kept."""
        self._wanted: dict[int, int] = {}
        """How many steps of a row are not removed yet."""
        self._spent: list[int] = []
        """Rows to delete."""
        for row, steps in self._file.found.items():
            self._keep(row, steps)
        self._last_row = max(self._wanted, default=0)
        self._thread = threading.Thread(target=self._write_on, name="stepwell-spool", daemon=True)
        self._thread.start()

    def take_leftovers(self) -> list[Step]:
        """What an earlier process did not deliver, oldest first."""
        leftovers = [step for steps in self._file.found.values() for step in steps]
        self._file.found.clear()
        return leftovers

    def add(self, steps: Sequence[Step]) -> None:
        self._changes.put(Change(steps, is_new=True))

    def remove(self, steps: Sequence[Step]) -> None:
        """They are delivered, or given up."""
        self._changes.put(Change(steps, is_new=False))

    def close(self) -> None:
        """Write what is still to be written, and let go of the file."""
        self._changes.put(None)
        self._thread.join()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_on(self) -> None:
        is_open = True
        while is_open:
            changes = [self._changes.get()]
            time.sleep(GATHERING)
            while not self._changes.empty():
                changes.append(self._changes.get())
            is_open = None not in changes
            fresh = self._sort([change for change in changes if change is not None])
            if self._spent and self._file.delete(self._spent):
                self._spent.clear()
            self._insert(fresh)

    def _sort(self, changes: Sequence[Change]) -> list[Step]:
        """Gives the steps to write, and marks the rows that are spent."""
        fresh: dict[Step, None] = {}
        for steps, is_new in changes:
            if is_new:
                fresh.update(dict.fromkeys(steps))
                continue
            for step in steps:
                if step in fresh:
                    del fresh[step]
                elif step in self._rows:
                    self._let_go(self._rows.pop(step))
        return list(fresh)

    def _insert(self, fresh: Sequence[Step]) -> None:
        for start in range(0, len(fresh), MAX_ROW):
            steps = fresh[start : start + MAX_ROW]
            self._last_row += 1
            if self._file.insert(self._last_row, steps):
                self._keep(self._last_row, steps)
            else:
                self.unwritten += len(steps)

    def _keep(self, row: int, steps: Sequence[Step]) -> None:
        self._rows.update(dict.fromkeys(steps, row))
        self._wanted[row] = len(steps)

    def _let_go(self, row: int) -> None:
        self._wanted[row] -= 1
        if not self._wanted[row]:
            del self._wanted[row]
            self._spent.append(row)
