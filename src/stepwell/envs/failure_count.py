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
from dataclasses import dataclass

from stepwell.errors import EnvironmentFailed

log = logging.getLogger("stepwell.envs")


@dataclass(frozen=True, slots=True)
class FailureLimits:
    failures: int = 12
    """Failures in a row after which the environment gives up."""
    first_pause: float = 0.1
    """Seconds after the first failure; each further failure doubles the pause."""
    longest_pause: float = 30.0


class FailureCount:
    def __init__(self, limits: FailureLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.dropped = Counter[str]()
        """Dropped groups and failed calls of the environment's code, by cause."""
        self.in_a_row = 0
        self.last_failure = ""
        self._failed_at = float("-inf")
        self._limits = limits or FailureLimits()
        self._clock = clock
        self._logged = set[str]()

    def check(self) -> None:
        """EnvironmentFailed after too many failures in a row."""
        if self.in_a_row >= self._limits.failures:
            raise EnvironmentFailed(f"{self.in_a_row} failures in a row, the last one in {self.last_failure}")

    @property
    def is_pausing(self) -> bool:
        """Whether the next group must wait because one failed recently."""
        if not self.in_a_row:
            return False
        pause = min(self._limits.longest_pause, self._limits.first_pause * 2.0 ** min(self.in_a_row - 1, 32))
        return self._clock() < self._failed_at + pause

    def now(self) -> float:
        return self._clock()

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
        self._log_once(cause, failure)
        if began_at is not None and began_at >= self._failed_at:
            self.in_a_row += 1
            self._failed_at = self._clock()

    def _log_once(self, cause: str, failure: BaseException) -> None:
        self.last_failure = f"{cause}: {type(failure).__name__}: {failure}"
        key = f"{cause} {type(failure).__name__} {_raised_at(failure)}"
        if key not in self._logged:
            self._logged.add(key)
            log.error("%s; the same again is only counted", self.last_failure, exc_info=failure)


def _raised_at(failure: BaseException) -> str:
    frames = traceback.extract_tb(failure.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
