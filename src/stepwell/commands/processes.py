"""The processes that `up` waits for, starts and supervises, what it prints meanwhile, and how it goes on in the
background.

- On Ctrl-C, SIGTERM or SIGHUP they get their time to finish; on a second signal they are killed.
- No process is left running in either case.
- In the background a forked child does the work; the caller prints what the child prints, and leaves when it is ready.
  If the child ends before that, the caller leaves with the child's exit status.
- The fork happens before anything is started, because Ray's threads would not survive it.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing, suppress
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

from stepwell.commands.launch_plan import LaunchPlan, ServedModel, environment, read_model
from stepwell.commands.state_folder import StateFolder
from stepwell.common.async_calls import Backoff, in_thread
from stepwell.common.http import JsonAnswer, get_json
from stepwell.common.processes import OnLogLine, Program, SupervisedProcess
from stepwell.engines import ENGINES
from stepwell.engines import vllm_control as vllm_command
from stepwell.engines.capabilities import find_missing
from stepwell.engines.connections import EngineConnections
from stepwell.engines.engine import EngineHttp
from stepwell.errors import WEIGHTS, EngineUnavailable, NotReady

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LARGEST_LOG = 16 * 2**20
"""Bytes; after that a new log file is started, and the previous one is kept."""
REMINDERS = Backoff(first=5.0, longest=60.0)
"""When a log that shows nothing else gets a short line: it still waits."""
CLEAR = "\r\033[K"
CHUNK = 4096
ENGINE_TIMEOUT = 300.0
"""Seconds: a vLLM that was started at the same time needs some minutes."""
POLL = 0.5
CHECK_TIMEOUT = 10.0
"""Seconds for all questions to one engine: the first token of a vLLM that has just started may take some."""
HOW_TO_START = vllm_command.one_line()


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


def wait_for_model(
    address: str, key: str | None, on_wait: Callable[[str], None], timeout: float = ENGINE_TIMEOUT
) -> ServedModel:
    """Asks until the engine answers. EngineUnavailable says what to do if it does not, or with something else."""
    deadline = time.monotonic() + timeout
    while (answer := get_json(f"{address}/v1/models", key)).status in (0, 502, 503):
        if time.monotonic() > deadline:
            raise EngineUnavailable(
                f"no engine answers at {address} after {timeout:g} s: {answer.message}; start one ({HOW_TO_START}), "
                "or name another with --engine"
            )
        on_wait(f"{answer.message} (tries for {timeout:g} s); if none runs, start one: {HOW_TO_START}")
        time.sleep(POLL)
    return read_model(address, answer)


def missing_lines(addresses: Sequence[str], key: str | None, timeout: float = CHECK_TIMEOUT) -> dict[str, list[str]]:
    """A line for each thing that engines lack: its cost, and the flag that helps; with the addresses of these engines.
    An engine that does not answer is a line too."""
    return asyncio.run(_missing_lines(addresses, key, timeout))


async def _missing_lines(addresses: Sequence[str], key: str | None, timeout: float) -> dict[str, list[str]]:
    lines: dict[str, list[str]] = {}
    with closing(EngineConnections(key)) as connections:
        found = await asyncio.gather(
            *(_lacks(EngineHttp(connections, address, timeout), timeout) for address in addresses)
        )
    for address, lacks in zip(addresses, found, strict=True):
        for line in lacks:
            lines.setdefault(line, []).append(address)
    return lines


async def _lacks(http: EngineHttp, timeout: float) -> list[str]:
    try:
        async with asyncio.timeout(timeout):
            return [str(missing) for missing in await find_missing(http, ENGINES)]
    except (EngineUnavailable, TimeoutError) as failure:
        why = str(failure) or f"no answer within {timeout:g} s"
        return [f"what it lacks is not known ({why}); `stepwell doctor --engine ADDRESS` examines it"]


def programs(plan: LaunchPlan, key: str) -> list[Program]:
    gateway, dashboard = plan.gateway.local_url, plan.dashboard.local_url
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


async def run_programs(
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
    match get_json(f"{plan.gateway.local_url}/ready", key).body:
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


def detach(folder: StateFolder) -> None:
    """Returns only in the child."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child:
        os.close(write_end)
        sys.exit(_follow(child, read_end, folder))
    os.close(read_end)
    os.setsid()
    _redirect(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(write_end, 1)
    _redirect(write_end, 2)


def redirect_output(log: Path) -> None:
    """Send all further output to the log. This closes the pipe to the caller, which then leaves."""
    _redirect(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
    os.dup2(1, 2)


def _redirect(source: int, target: int) -> None:
    os.dup2(source, target)
    os.close(source)


def _follow(child: int, read_end: int, folder: StateFolder) -> int:
    """Prints the child's output; returns the exit status."""
    while True:
        try:
            chunk = os.read(read_end, CHUNK)
        except KeyboardInterrupt:
            os.kill(child, signal.SIGTERM)
            continue
        if not chunk:
            break
        os.write(1, chunk)
    record = folder.record()
    if record is not None and record.pid == child and record.is_ready:
        return 0
    return abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
