"""StopSignal: the first SIGINT or SIGTERM lets groups in progress finish, the second one ends at once."""

import asyncio
import logging
import signal
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

log = logging.getLogger("stepwell.envs")

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    def __init__(self) -> None:
        self.requested = asyncio.Event()
        """Start nothing more; let groups in progress finish."""
        self.immediate = asyncio.Event()
        """Let nothing finish."""

    def request(self) -> None:
        if self.requested.is_set():
            self.immediate.set()
            return
        log.info("stopping when the groups in progress have finished; a second signal stops at once")
        self.requested.set()

    def stop_now(self) -> None:
        self.requested.set()
        self.immediate.set()


@contextmanager
def stop_by_signal() -> Iterator[StopSignal]:
    """Outside the main thread no signals arrive."""
    stop, loop = StopSignal(), asyncio.get_running_loop()
    signals = SIGNALS if threading.current_thread() is threading.main_thread() else ()
    for number in signals:
        loop.add_signal_handler(number, stop.request)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def unless(event: asyncio.Event, work: Awaitable[T]) -> T | None:
    """The result of the work; None if the event is set first, which cancels the work."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
