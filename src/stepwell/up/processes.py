"""The processes that `up` starts and supervises, and what it prints meanwhile.

- On Ctrl-C, SIGTERM or SIGHUP they get their time to finish; on a second signal they are killed.
- No process is left running in either case.
"""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

from stepwell.common.async_calls import in_thread
from stepwell.common.processes import OnLogLine, Program, SupervisedProcess
from stepwell.common.retry import Backoff
from stepwell.errors import WEIGHTS, NotReady
from stepwell.up.http import JsonAnswer, get_json
from stepwell.up.launch_plan import LaunchPlan, environment, url_of

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LARGEST_LOG = 16 * 2**20
"""Bytes; after that a new log file is started, and the previous one is kept."""
REMINDERS = Backoff(first=5.0, longest=60.0)
"""When a log that shows nothing else gets a short line: it still waits."""
CLEAR = "\r\033[K"


class StartupScreen:
    """Prints one line for each finished step, and what is being waited for.

    In a terminal the last line says what is being waited for, and is overwritten; elsewhere each change is a line, and
    an unchanged wait gets short reminders, ever more rarely.
    """

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._started = clock()
        self._waiting_for: dict[str, str] = {}
        self._shown = ""
        self._pauses = REMINDERS.pauses()
        self._remind_at = 0.0

    def say(self, text: str, *, instead_of: str = "") -> None:
        """A permanent line. `instead_of` names a wait that has ended."""
        self._waiting_for.pop(instead_of, None)
        self._write(f"{self._cleared()}{self._line(text)}\n")

    def show(self, text: str) -> None:
        """The text without a time stamp, to be read or copied."""
        self._write(f"{self._cleared()}{text}\n")

    def wait(self, what: str, why: str) -> None:
        """Call it as often as you like while `what` is being waited for."""
        self._waiting_for[what] = why
        text = "waiting for " + " · ".join(f"{what}: {why}" for what, why in self._waiting_for.items())
        if self._out.isatty():
            self._write(f"{CLEAR}{self._line(text)}")
        elif text != self._shown:
            self._shown, self._pauses = text, REMINDERS.pauses()
            self._remind_at = self._clock() + next(self._pauses)
            self._write(f"{self._line(text)}\n")
        elif self._clock() >= self._remind_at:
            self._remind_at = self._clock() + next(self._pauses)
            self._write(f"{self._line('still waiting for ' + ' · '.join(self._waiting_for))}\n")

    def _line(self, text: str) -> str:
        return f"{self._clock() - self._started:6.1f} s  {text}"

    def _cleared(self) -> str:
        return CLEAR if self._out.isatty() else ""

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def programs(plan: LaunchPlan, key: str) -> list[Program]:
    gateway, dashboard = url_of(plan.gateway), url_of(plan.dashboard)
    return [
        Program(
            name="gateway",
            command=(sys.executable, "-m", "stepwell", "gateway"),
            env=environment(plan.gateway),
            why_not_ready=partial(_why_no_gateway, f"{gateway}/ready", key),
        ),
        Program(
            name="dashboard",
            command=(sys.executable, "-m", "stepwell", "dashboard"),
            env=environment(plan.dashboard),
            why_not_ready=partial(_why_no_dashboard, f"{dashboard}/api/status", key),
        ),
    ]


async def serve(
    wanted: Sequence[Program],
    logs: Path,
    screen: StartupScreen,
    *,
    on_ready: Callable[[], None],
    on_end: Callable[[], None],
) -> bool:
    """Runs them until a signal comes; returns whether they were ready by then. NotReady if one does not start."""
    this_task, is_ready = asyncio.current_task(), False
    assert this_task is not None
    for number in END_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, this_task.cancel)
    with suppress(asyncio.CancelledError):
        async with AsyncExitStack() as stack:
            await _start(stack, wanted, logs, screen)
            is_ready = True
            on_ready()
            stack.callback(on_end)
            await asyncio.Event().wait()
    return is_ready


async def _start(stack: AsyncExitStack, wanted: Sequence[Program], logs: Path, screen: StartupScreen) -> None:
    """Starts all at once. If one fails, those that are not ready yet are ended here; the stack ends the others."""

    async def start(program: Program) -> None:
        what = f"the {program.name}"
        process = SupervisedProcess(
            program, on_line=_write_to(logs / f"{program.name}.log"), on_wait=partial(screen.wait, what)
        )
        await stack.enter_async_context(process)
        screen.say(f"{what} is ready", instead_of=what)

    try:
        async with asyncio.TaskGroup() as starting:
            for program in wanted:
                starting.create_task(start(program))
    except* NotReady as failed:
        raise failed.exceptions[0] from None


def why_no_weights(plan: LaunchPlan, key: str) -> str | None:
    """Why the gateway fails all calls, although everything is up; None if it does not."""
    match get_json(f"{url_of(plan.gateway)}/ready", key).body:
        case {"missing": dict(missing)} if WEIGHTS in missing:
            return str(missing[WEIGHTS])
    return None


async def _why_no_gateway(url: str, key: str) -> str | None:
    """A gateway whose engines lack weights is up: the trainer that brings them may need it."""
    answer = await in_thread(partial(get_json, url, key))
    if answer.status == 200:
        return None
    match answer.body:
        case {"missing": dict(missing)}:
            return "; ".join(f"{part}: {why}" for part, why in missing.items() if part != WEIGHTS) or None
    return _why_no_answer(answer)


async def _why_no_dashboard(url: str, key: str) -> str | None:
    """The dashboard asks the gateway only at intervals. It is ready once its status shows the gateway as ready."""
    answer = await in_thread(partial(get_json, url, key))
    match answer.body:
        case {"gateways": [{"ready": True}, *_]}:
            return None
        case {"gateways": [{"missing": [str(only)]}, *_]} if only.startswith(f"{WEIGHTS}: "):
            return None
    return "it has not reached the gateway yet" if answer.status == 200 else _why_no_answer(answer)


def _why_no_answer(answer: JsonAnswer) -> str:
    return answer.message if answer.status else "it is starting"


def _write_to(path: Path) -> OnLogLine:
    file = RotatingFileHandler(path, maxBytes=LARGEST_LOG, backupCount=1)

    def write(level: int, text: str) -> None:
        file.emit(logging.makeLogRecord({"msg": text}))

    return write
