"""The common part of all command lines, those of `stepwell` and of environments: flags, progress and failures.

- A failure is one line for each mistake, after the name of the program.
- A flag is written out in full. `--group_size` and `--group-size` are the same flag.
- Progress is a line on stderr: rewritten in a terminal, elsewhere a new line every ten seconds.
"""

import argparse
import asyncio
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import NoReturn, TextIO

from stepwell.errors import BadRequest, StepwellError

ONLY_FLAGS = "%(prog)s [FLAGS]"
"""A usage that lists no flags."""

INTERVAL = 10.0
TERMINAL_INTERVAL = 0.2
"""Seconds between two lines."""
CLEAR = "\r\x1b[K"


class FlagParser(argparse.ArgumentParser):
    """A parser whose errors are BadRequest, with a suggestion for an unknown flag."""

    def __init__(
        self, program: str, about: str | None = None, *, usage: str | None = ONLY_FLAGS, epilog: str = ""
    ) -> None:
        super().__init__(
            prog=program,
            usage=usage,
            description=about,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        flag = next((word for word in message.split() if word.startswith("--")), "")
        near = get_close_matches(flag, self._option_string_actions, n=1)
        raise BadRequest(message + (f"; did you mean {near[0]}?" if "unrecognized" in message and near else ""))


def with_dashes(words: Sequence[str]) -> list[str]:
    """The words of a command line, with the names of flags as they are registered."""
    return [_with_dashes(word) if word.startswith("--") else word for word in words]


def _with_dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def say(line: str) -> None:
    """A line of a command's result."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextmanager
def failing(program: str, *, status: int) -> Iterator[None]:
    """Ends the process with this status after a failure of the block, which is told."""
    try:
        yield
    except StepwellError as failure:
        fail(program, str(failure), status=status)


def tell(program: str, text: str) -> None:
    """Lines of a failure."""
    for line in text.splitlines():
        print(f"{program}: {line}", file=sys.stderr, flush=True)  # noqa: T201 - a command line prints


def fail(program: str, text: str, *, status: int) -> NoReturn:
    tell(program, text)
    sys.exit(status)


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
