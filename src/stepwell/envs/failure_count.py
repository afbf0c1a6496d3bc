"""FailureCount: counts failures by cause, and says when an environment must pause or give up.

- Everything is counted. A failure's traceback is logged once; the same failure is only counted after that.
- Groups that were in progress together when one failed count as one failure: only a group that began after the last
  failure makes the sequence of failures longer.
"""

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stepwell.errors import EnvironmentFailed

log = logging.getLogger("stepwell.envs")


class FailureCount:
    def __init__(
        self,
        limit: int = 12,
        *,
        first_pause: float = 0.1,
        longest_pause: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The environment gives up after `limit` failures in a row. It pauses for `first_pause` seconds after the first
        one; each further failure doubles the pause."""
        self.dropped = Counter[str]()
        """Dropped groups and failed calls of the environment's code, by cause."""
        self.in_a_row = 0
        self.last_failure = ""
        self._failed_at = float("-inf")
        self._limit, self._first_pause, self._longest_pause = limit, first_pause, longest_pause
        self.now = clock
        self._logged = set[str]()

    def check(self) -> None:
        """EnvironmentFailed after too many failures in a row."""
        if self.in_a_row >= self._limit:
            raise EnvironmentFailed(f"{self.in_a_row} failures in a row, the last one in {self.last_failure}")

    @property
    def is_pausing(self) -> bool:
        """Whether the next group must wait because one failed recently."""
        if not self.in_a_row:
            return False
        pause = min(self._longest_pause, self._first_pause * 2.0 ** min(self.in_a_row - 1, 32))
        return self.now() < self._failed_at + pause

    def drop(self, cause: str, why: str = "") -> None:
        self.dropped[cause] += 1
        if why and self.dropped[cause] == 1:
            log.warning("a group is dropped (%s): %s; more of these are only counted", cause, why)

    def succeed(self) -> None:
        """A group was made, whether it is sent or not."""
        self.in_a_row = 0

    @contextmanager
    def catching(self, cause: str, began_at: float | None = None) -> Iterator[None]:
        """Around every call of the environment's code. `began_at` is the start of the group that the call is for."""
        try:
            yield
        except Exception as failure:  # noqa: BLE001 - an author's code raises anything; one failure must not end the run
            self.fail(cause, failure, began_at)

    def fail(self, cause: str, failure: BaseException, began_at: float | None = None) -> None:
        self.drop(cause)
        self.last_failure = f"{cause}: {type(failure).__name__}: {failure}"
        raised_at = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(failure.__traceback__)[-1:]]
        key = f"{cause} {type(failure).__name__} {raised_at}"
        if key not in self._logged:
            self._logged.add(key)
            log.error("%s; the same again is only counted", self.last_failure, exc_info=failure)
        if began_at is not None and began_at >= self._failed_at:
            self.in_a_row += 1
            self._failed_at = self.now()
