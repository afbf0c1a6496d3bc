"""Progress, shown on stderr: a line that changes in a terminal, else a line every ten seconds. It decides nothing."""

import asyncio
import sys
from collections.abc import Callable

REFRESH = 0.5
EVERY = 10.0


async def show(line: Callable[[], str]) -> None:
    """Until cancelled; the last state is left standing."""
    try:
        if sys.stderr.isatty() and _has_rich():
            await _in_terminal(line)
        else:
            await _line_by_line(line)
    finally:
        _say(line())


async def _line_by_line(line: Callable[[], str]) -> None:
    while True:
        await asyncio.sleep(EVERY)
        _say(line())


async def _in_terminal(line: Callable[[], str]) -> None:
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("starting") as status:
        while True:
            status.update(Text(line()))
            await asyncio.sleep(REFRESH)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _has_rich() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True
