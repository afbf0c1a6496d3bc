"""A line of progress on stderr: rewritten in a terminal, elsewhere a new line every ten seconds."""

import asyncio
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

INTERVAL = 10.0
TERMINAL_INTERVAL = 0.2
"""Seconds between two lines."""
CLEAR = "\r\x1b[K"


class ProgressLine:
    def __init__(
        self,
        text: Callable[[], str],
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval: float | None = None,
    ) -> None:
        self._text, self._out, self._clock = text, out or sys.stderr, clock
        self._is_terminal = self._out.isatty()
        self._interval = (TERMINAL_INTERVAL if self._is_terminal else INTERVAL) if interval is None else interval
        self._shown_at = clock()

    def update(self) -> None:
        """Show the text, unless the last line is too recent."""
        if self._clock() - self._shown_at >= self._interval:
            self._shown_at = self._clock()
            self._show()

    async def run(self) -> None:
        """Show the text again and again until cancelled; the last text stays."""
        try:
            while True:
                await asyncio.sleep(self._interval)
                self._show()
        finally:
            self.clear()
            self._write(f"{self._text()}\n")

    def clear(self) -> None:
        if self._is_terminal:
            self._write(CLEAR)

    def _show(self) -> None:
        if self._is_terminal:
            self._write(CLEAR + self._text()[: shutil.get_terminal_size().columns - 1])
        else:
            self._write(f"{self._text()}\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
