"""Repeated calls: a call that fails for a passing reason is made again after a pause.

Only for calls that are safe to repeat.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between attempts, in seconds."""

    first: float
    longest: float
    """The pause doubles after every attempt up to this."""
    jitter: float = 0.0
    """The share by which a pause varies at random, so that many callers do not return at once."""

    def pauses(self) -> Iterator[float]:
        pause = self.first
        while True:
            yield pause * random.uniform(1 - self.jitter, 1 + self.jitter)
            pause = min(2 * pause, self.longest)


async def retry_while_unavailable(
    call: Callable[[], Awaitable[T]],
    unavailable: type[E] | tuple[type[E], ...],
    backoff: Backoff,
    *,
    attempts: int | None = None,
    seconds: float | None = None,
    before_pause: Callable[[E, float], float] | None = None,
) -> T:
    """Make the call until it answers, fails in another way, or the attempts or seconds are used up.

    `before_pause` sees the failure and the planned pause, and returns the pause to make.
    """
    loop = asyncio.get_running_loop()
    deadline = None if seconds is None else loop.time() + seconds
    for attempt, pause in enumerate(backoff.pauses(), 1):
        try:
            return await call()
        except unavailable as failure:
            is_last = attempt == attempts or (deadline is not None and loop.time() + pause > deadline)
            if is_last:
                raise
            wait = pause if before_pause is None else before_pause(failure, pause)
        await asyncio.sleep(wait)
    raise AssertionError("the pauses of a Backoff have no end")
