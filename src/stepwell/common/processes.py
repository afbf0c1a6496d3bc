"""A program kept running as a child of this process: started, listened to, restarted when it dies, ended at the end.

    async with KeptProcess(Program(name="gateway", command=…, why_not_ready=…), hear=…, still_waiting=…) as process:
        ...

What always holds: its output is read as it comes, so that it can never hang on a full pipe; on Linux it does not
outlive this process, however that ends. A program that dies before it was ready is an error that says what it said;
one that dies later is started again, each time after a longer pause unless it had been up for a while.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeAlias

import orjson

from stepwell.common.child import Child, Tail, how_it_ended
from stepwell.errors import NotReady

log = logging.getLogger("stepwell.agents")

POLL = 0.1
LINES_KEPT = 20
GRACE = 40.0
"""Seconds a program gets to end by itself; a gateway takes up to 30 to deliver its last steps."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
LONG_ENOUGH = 60.0
"""Seconds after which a program that was up is no longer thought to be failing."""

HearLog: TypeAlias = Callable[[int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    name: str
    """For whoever reads what happens to it, after "the"."""
    command: Sequence[str]
    why_not_ready: Callable[[], Awaitable[str | None]]
    """Asked until it gives None."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's own, out of sight of whoever lists processes."""


class KeptProcess:
    """Used inside `async with`; inside the block it is ready, or was."""

    def __init__(
        self, program: Program, *, hear: HearLog, still_waiting: Callable[[str], None], ready_timeout: float = 300.0
    ) -> None:
        """`hear` gets the level and text of each line that it writes, `still_waiting` the reason each time that it is
        not ready yet."""
        self.restarts = 0
        self._program = program
        self._hear_log = hear
        self._still_waiting = still_waiting
        self._ready_timeout = ready_timeout
        self._said = Tail(LINES_KEPT)
        self._child: Child | None = None
        self._keeping_up: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def __aenter__(self) -> Self:
        child = self._start()
        try:
            await self._wait_until_ready(child)
        except BaseException:
            await child.close()
            raise
        self._keeping_up = asyncio.create_task(self._keep_up())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._keeping_up is not None
        self._keeping_up.cancel()
        await asyncio.wait([self._keeping_up])
        assert self._child is not None
        await self._end(self._child)

    def _start(self) -> Child:
        tethered = [sys.executable, "-m", "stepwell.common.die_with_parent", str(os.getpid()), *self._program.command]
        self._child = Child(tethered, env=self._program.env, hear=self._hear, hear_errors=self._hear)
        return self._child

    def _hear(self, line: str) -> None:
        level, text = _read_log_line(line)
        self._said.add(text)
        self._hear_log(level, text)

    async def _wait_until_ready(self, child: Child) -> None:
        deadline = time.monotonic() + self._ready_timeout
        name = self._program.name
        while (why := await self._program.why_not_ready()) is not None:
            if child.has_ended:
                raise NotReady(f"the {name} ended with {how_it_ended(await child.wait())}:\n{self._said}")
            if time.monotonic() > deadline:
                raise NotReady(f"the {name} is not ready after {self._ready_timeout:g} s: {why}")
            self._still_waiting(why)
            await asyncio.sleep(POLL)

    async def _keep_up(self) -> None:
        pause = FIRST_PAUSE
        while True:
            assert self._child is not None
            started = time.monotonic()
            how = how_it_ended(await self._child.wait())
            pause = FIRST_PAUSE if time.monotonic() - started > LONG_ENOUGH else pause
            log.warning("the %s ended with %s; starting it again in %g s", self._program.name, how, pause)
            await self._child.close()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            self.restarts += 1
            self._start()

    async def _end(self, child: Child) -> None:
        """In its own time, so that it can finish what it has begun, but not without end."""
        try:
            child.terminate()
            async with asyncio.timeout(GRACE):
                await child.wait()
        except TimeoutError:
            log.warning("the %s did not end within %g s and is killed", self._program.name, GRACE)
        finally:
            await child.close()


def _read_log_line(line: str) -> tuple[int, str]:
    """Its level and its text, of a program of ours that writes JSON; what is no such line is passed on as it is."""
    try:
        record = orjson.loads(line)
        level = logging.getLevelNamesMapping()[record["level"]]
        return level, "\n".join(str(record[part]) for part in ("message", "exception") if part in record)
    except (ValueError, KeyError, TypeError):
        return logging.INFO, line
