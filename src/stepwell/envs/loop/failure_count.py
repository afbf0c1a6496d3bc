"""What came to nothing, by cause; and when so much has failed in a row that going on makes no sense.

What always holds: everything is counted; a failure's traceback is logged the first time it is seen, the same failure
again only counts. Groups that were under way together when one failed fail as one: only a group begun after the last
failure makes the row longer.
"""

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stepwell.errors import EnvironmentFailed

log = logging.getLogger("stepwell.envs")


@dataclass(frozen=True, slots=True)
class Patience:
    failures: int = 12
    """In a row, after which the environment gives up."""
    first: float = 0.1
    """Seconds to wait after the first; twice as long after each further one."""
    longest: float = 30.0


class Tally:
    def __init__(self, patience: Patience | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.dropped = Counter[str]()
        """What came to nothing, by cause: groups, and calls of the environment's own code that failed."""
        self.delivered = 0
        """Groups sent, or written."""
        self.in_a_row = 0
        self.last_failure = ""
        self._failed_at = float("-inf")
        self._patience = patience or Patience()
        self._clock = clock
        self._known = set[str]()

    def check(self) -> None:
        """EnvironmentFailed once too much has failed in a row."""
        if self.in_a_row >= self._patience.failures:
            raise EnvironmentFailed(f"{self.in_a_row} failures in a row, the last one in {self.last_failure}")

    @property
    def is_holding(self) -> bool:
        """Has work failed so short a time ago that the next should wait?"""
        if not self.in_a_row:
            return False
        pause = min(self._patience.longest, self._patience.first * 2.0 ** min(self.in_a_row - 1, 32))
        return self._clock() < self._failed_at + pause

    def now(self) -> float:
        return self._clock()

    def drop(self, cause: str, why: str = "") -> None:
        self.dropped[cause] += 1
        if why and self.dropped[cause] == 1:
            log.warning("a group is dropped (%s): %s; more of these are only counted", cause, why)

    def succeed(self) -> None:
        """A group was made, be it worth sending or not."""
        self.in_a_row = 0

    @contextmanager
    def catching(self, cause: str, began_at: float | None = None) -> Iterator[None]:
        """Around the environment's own code, the one place where it is caught. With `began_at` it is a group's."""
        try:
            yield
        except Exception as failure:  # noqa: BLE001 - it may raise anything, and one failure is no reason to end
            self.fail(cause, failure, began_at)

    def fail(self, cause: str, failure: BaseException, began_at: float | None = None) -> None:
        self.drop(cause)
        self._say(cause, failure)
        if began_at is not None and began_at >= self._failed_at:
            self.in_a_row += 1
            self._failed_at = self._clock()

    def _say(self, cause: str, failure: BaseException) -> None:
        """With its traceback, if it is new."""
        self.last_failure = f"{cause}: {type(failure).__name__}: {failure}"
        sort = f"{cause} {type(failure).__name__} {_place(failure)}"
        if sort not in self._known:
            self._known.add(sort)
            log.error("%s; the same again is only counted", self.last_failure, exc_info=failure)


def _place(failure: BaseException) -> str:
    frames = traceback.extract_tb(failure.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
