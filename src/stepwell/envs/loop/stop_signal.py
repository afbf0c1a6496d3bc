"""Being told to stop: by SIGINT or SIGTERM, once to end well, twice to end now."""

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


class Stop:
    def __init__(self) -> None:
        self.asked = asyncio.Event()
        """Start nothing more; let what is under way finish."""
        self.hurried = asyncio.Event()
        """Let nothing finish."""

    def ask(self) -> None:
        if self.asked.is_set():
            self.hurried.set()
            return
        log.info("stopping once what is under way has finished; a second signal stops at once")
        self.asked.set()

    def hurry(self) -> None:
        self.asked.set()
        self.hurried.set()


@contextmanager
def stop_by_signal() -> Iterator[Stop]:
    """Outside the main thread, where signals do not arrive, it is never asked."""
    stop, loop = Stop(), asyncio.get_running_loop()
    signals = SIGNALS if threading.current_thread() is threading.main_thread() else ()
    for each in signals:
        loop.add_signal_handler(each, stop.ask)
    try:
        yield stop
    finally:
        for each in signals:
            loop.remove_signal_handler(each)


async def unless(asked: asyncio.Event, work: Awaitable[T]) -> T | None:
    """What the work gives; None, and its end, as soon as that is asked for."""
    doing, waiting = asyncio.ensure_future(work), asyncio.ensure_future(asked.wait())
    try:
        await asyncio.wait((doing, waiting), return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        for each in (doing, waiting):
            each.cancel()
        await asyncio.gather(doing, waiting, return_exceptions=True)
