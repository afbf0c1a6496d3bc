"""SIGTERM ends the demo as Ctrl-C does: what it has started is ended first."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(BaseException):
    """A SIGTERM came."""


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """A SIGTERM ends the block by Terminated. Further ones do not disturb the cleanup. For the main thread."""
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """The handler of SIGTERM is the same after the block: a start of Ray sets one of its own."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise Terminated
