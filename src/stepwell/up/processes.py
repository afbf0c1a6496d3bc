"""The processes that `up` keeps running, and how they end.

What always holds: told to end, by Ctrl-C or SIGTERM, they get their time to finish; told again, they are killed;
nothing is left of them either way.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path

from stepwell.common.async_calls import in_thread
from stepwell.common.processes import OnLogLine, Program, SupervisedProcess
from stepwell.errors import NotReady
from stepwell.up.http import Answer, get, message
from stepwell.up.launch_plan import Plan, environment, url_of
from stepwell.up.screen import Screen

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LARGEST_LOG = 16 * 2**20
"""Bytes, after which a log begins anew and the one before is kept beside it."""


def programs(plan: Plan, key: str) -> list[Program]:
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
    wanted: Sequence[Program], logs: Path, screen: Screen, *, on_ready: Callable[[], None], on_end: Callable[[], None]
) -> bool:
    """Until told to end; whether they were ready by then. NotReady if one of them does not start."""
    told, is_ready = asyncio.current_task(), False
    assert told is not None
    for number in ENDING:
        asyncio.get_running_loop().add_signal_handler(number, told.cancel)
    with suppress(asyncio.CancelledError):
        async with AsyncExitStack() as stack:
            await _start(stack, wanted, logs, screen)
            is_ready = True
            on_ready()
            stack.callback(on_end)
            await asyncio.Event().wait()
    return is_ready


async def _start(stack: AsyncExitStack, wanted: Sequence[Program], logs: Path, screen: Screen) -> None:
    """All at once. If one fails, those that were not ready yet are ended here; the others are on the stack."""

    async def start(program: Program) -> None:
        what = f"the {program.name}"
        process = SupervisedProcess(
            program, on_line=_writing(logs / f"{program.name}.log"), on_wait=partial(screen.wait, what)
        )
        await stack.enter_async_context(process)
        screen.say(f"{what} is ready", instead_of=what)

    try:
        async with asyncio.TaskGroup() as starting:
            for program in wanted:
                starting.create_task(start(program))
    except* NotReady as failed:
        raise failed.exceptions[0] from None


async def _why_no_gateway(url: str, key: str) -> str | None:
    answer = await in_thread(partial(get, url, key))
    if answer.status == 200:
        return None
    match answer.body:
        case {"missing": dict(missing)}:
            return "; ".join(f"{part}: {why}" for part, why in missing.items())
    return _why_no_answer(answer)


async def _why_no_dashboard(url: str, key: str) -> str | None:
    """It looks at the gateway only now and then: a status that is asked for at once should not call it missing."""
    answer = await in_thread(partial(get, url, key))
    match answer.body:
        case {"gateways": [{"ready": True}, *_]}:
            return None
    return "it has not seen the gateway yet" if answer.status == 200 else _why_no_answer(answer)


def _why_no_answer(answer: Answer) -> str:
    return message(answer) if answer.status else "it is starting"


def _writing(path: Path) -> OnLogLine:
    file = RotatingFileHandler(path, maxBytes=LARGEST_LOG, backupCount=1)

    def hear(level: int, text: str) -> None:
        file.emit(logging.makeLogRecord({"msg": text}))

    return hear
