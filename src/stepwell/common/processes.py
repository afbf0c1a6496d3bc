"""Child processes: a command that runs to its end, and a program that is restarted when it dies.

    async with SupervisedProcess(Program(name="gateway", command=…, why_not_ready=…), on_line=…, on_wait=…) as process:
        ...

- A child's output is read as it comes and in bounded memory, so a full pipe never blocks the child.
- A child's end is noticed even while a process that it started holds its pipes (asyncio's own processes miss it then).
- Closing a child kills it and everything that it started. On Linux a supervised program does not outlive this process.
- A program that dies before it is ready is an error with its last lines. One that dies later is started again, each
  time after a longer pause unless it was up for a while.
"""

import asyncio
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self, TypeAlias

import orjson

from stepwell.common.async_calls import in_thread, run_to_end
from stepwell.errors import NotReady

log = logging.getLogger("stepwell.agents")

CHILD_PORTS = (26_000, 32_000)
"""Above the ports of Ray's workers, below those that systems give to connections."""
PORT_TRIES = 100
CHUNK = 2**16
LONGEST_LINE = 2**16
"""Bytes; the rest of a longer line is dropped."""
DRAIN_TIMEOUT = 1.0
"""Seconds to read what an ended child has left in its pipes."""
POLL = 0.1
PROGRAM_LINES = 20
COMMAND_LINES = 200
GRACE = 40.0
"""Seconds that a program has to end by itself; a gateway takes up to 30 to deliver its last steps."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
STABLE_AFTER = 60.0
"""Seconds; a program that was up for longer is restarted after the first pause again."""
PLAIN_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE"),
    *("LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""The variables of this process's environment that a command gets."""

OnLine: TypeAlias = Callable[[str], None]
OnLogLine: TypeAlias = Callable[[int, str], None]


class CommandFailed(Exception):
    """A command could not be started, or failed; the text has its last lines."""

    def __init__(self, why: str, *, code: int | None = None, last_line: str = "") -> None:
        """`code` is its exit code, None if it could not be started; `last_line` is the last one of its stderr."""
        super().__init__(why)
        self.code = code
        self.last_line = last_line


class ChildProcess:
    """Made inside an event loop; whoever makes it closes it. OSError if it cannot be started."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        on_stdout: OnLine,
        on_stderr: OnLine,
        stdin: bytes = b"",
        cwd: Path | None = None,
    ) -> None:
        """`env` is its whole environment; `cwd` is that of this process if none is given."""
        with tempfile.TemporaryFile() as stdin_file:
            stdin_file.write(stdin)
            stdin_file.seek(0)
            self._process = subprocess.Popen(
                command,
                stdin=stdin_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                cwd=cwd,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            asyncio.create_task(_read_lines(self._process.stdout, on_stdout)),
            asyncio.create_task(_read_lines(self._process.stderr, on_stderr)),
        ]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def terminate(self) -> None:
        self._process.terminate()

    async def wait(self) -> int:
        """The exit code, after the process has ended and its output was read."""
        code = await in_thread(self._process.wait)
        kill_group(self._process)  # what it left running would keep its pipes open
        await asyncio.wait(self._readers, timeout=DRAIN_TIMEOUT)
        return code

    async def close(self) -> None:
        """Kills it if it runs. A cancelled caller still waits until that is done."""
        await run_to_end(self._close())

    async def _close(self) -> None:
        if not self.has_ended:
            kill_group(self._process)
        await self.wait()
        for task in self._readers:
            task.cancel()
        await asyncio.wait(self._readers)


class LastLines:
    """The last lines that were added; empty lines are skipped."""

    def __init__(self, size: int) -> None:
        self._lines: deque[str] = deque(maxlen=size)

    def add(self, line: str) -> None:
        if line.strip():
            self._lines.append(line.rstrip())

    def __str__(self) -> str:
        return "\n".join(self._lines)


def plain_environment() -> dict[str, str]:
    """The variables that every program needs, and no keys: a command that does what a model says must not have them."""
    return {name: os.environ[name] for name in PLAIN_VARIABLES if name in os.environ}


async def run_command(command: Sequence[str], *, env: Mapping[str, str], stdin: bytes, cwd: Path | None = None) -> str:
    """The last lines that the command wrote to stdout. It leaves no process behind, also when it is cancelled."""
    stdout, stderr = LastLines(COMMAND_LINES), LastLines(COMMAND_LINES)
    try:
        child = ChildProcess(command, env=env, on_stdout=stdout.add, on_stderr=stderr.add, stdin=stdin, cwd=cwd)
    except (OSError, ValueError) as failure:
        raise CommandFailed(f"{command[0]} cannot be started: {failure}") from None
    try:
        code = await child.wait()
    finally:
        await child.close()
    if code != 0:
        why = f"{command[0]} ended with {exit_text(code)}: {str(stderr) or stdout}"
        raise CommandFailed(why, code=code, last_line=str(stderr).rpartition("\n")[2])
    return str(stdout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    name: str
    """Used in messages, after "the"."""
    command: Sequence[str]
    why_not_ready: Callable[[], Awaitable[str | None]]
    """Called until it returns None."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of this process; not visible in the list of processes."""


class SupervisedProcess:
    """Used inside `async with`; the block begins when the program is ready."""

    restarts: int = 0
    """The number of times that the program ended and was started again."""

    def __init__(
        self, program: Program, *, on_line: OnLogLine, on_wait: Callable[[str], None], ready_timeout: float = 300.0
    ) -> None:
        """`on_line` gets the level and text of each line that the program writes; `on_wait` gets the reason each time
        that the program is not ready yet."""
        self._program = program
        self._on_line = on_line
        self._on_wait = on_wait
        self._ready_timeout = ready_timeout
        self._last_lines = LastLines(PROGRAM_LINES)
        self._child: ChildProcess | None = None
        self._supervision: asyncio.Task[None] | None = None

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
        self._supervision = asyncio.create_task(self._restart_when_it_ends())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Terminates the program, and kills it if it does not end within the grace period."""
        assert self._supervision is not None
        self._supervision.cancel()
        await asyncio.wait([self._supervision])
        assert self._child is not None
        try:
            self._child.terminate()
            async with asyncio.timeout(GRACE):
                await self._child.wait()
        except TimeoutError:
            log.warning("the %s did not end within %g s and is killed", self._program.name, GRACE)
        finally:
            await self._child.close()

    def _start(self) -> ChildProcess:
        command = dying_with_this_process(self._program.command)
        env = {**os.environ, **self._program.env}
        self._child = ChildProcess(command, env=env, on_stdout=self._read, on_stderr=self._read)
        return self._child

    def _read(self, line: str) -> None:
        level, text = _read_log_line(line)
        self._last_lines.add(text)
        self._on_line(level, text)

    async def _wait_until_ready(self, child: ChildProcess) -> None:
        deadline = time.monotonic() + self._ready_timeout
        name = self._program.name
        while (why := await self._program.why_not_ready()) is not None:
            if child.has_ended:
                raise NotReady(f"the {name} ended with {exit_text(await child.wait())}:\n{self._last_lines}")
            if time.monotonic() > deadline:
                raise NotReady(f"the {name} is not ready after {self._ready_timeout:g} s: {why}")
            self._on_wait(why)
            await asyncio.sleep(POLL)

    async def _restart_when_it_ends(self) -> None:
        pause = FIRST_PAUSE
        while True:
            assert self._child is not None
            started = time.monotonic()
            code = await self._child.wait()
            pause = FIRST_PAUSE if time.monotonic() - started > STABLE_AFTER else pause
            log.warning("the %s ended with %s; starting it again in %g s", self._program.name, exit_text(code), pause)
            await self._child.close()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            self.restarts += 1
            self._start()


def dying_with_this_process(command: Sequence[str]) -> list[str]:
    """The command, in a form that ends it when this process ends (on Linux)."""
    return [sys.executable, "-m", "stepwell.common.own_process", str(os.getpid()), *command]


def exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills the process, which leads its own session, and everything that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end_group(process: subprocess.Popen[bytes], *, timeout: float) -> None:
    """Terminates the process and everything that it started, kills what is left after the timeout, and waits for all
    of them: children can outlive the process that leads the group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + timeout
        while _group_is_alive(process) and time.monotonic() < deadline:
            time.sleep(0.05)


def kill_marked(name: str, value: str, *, timeout: float = 5.0) -> None:
    """Kills all processes that were started with this environment variable, and waits until they have ended: also those
    that have left the session of the process that started them. Only on Linux; elsewhere it does nothing."""
    deadline = time.monotonic() + timeout
    while (pids := _marked(f"{name}={value}".encode())) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def free_port(host: str) -> int:
    """A port that is free now, and that no connection gets from the system before a child listens there."""
    for port in random.sample(range(*CHILD_PORTS), k=PORT_TRIES):
        with suppress(OSError), socket.create_server((host, port)):
            return port
    first, end = CHILD_PORTS
    raise NotReady(f"{PORT_TRIES} of the ports {first} to {end - 1} of {host} were tried, and none is free")


def last_lines(log_file: Path, count: int) -> str:
    """The end of a child's log file, for an error text."""
    lines = log_file.read_text(errors="replace").splitlines()[-count:]
    return "\n".join([f"the last lines of {log_file}:", *lines])


def _marked(variable: bytes) -> list[int]:
    pids = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if variable in environment.read_bytes().split(b"\0"):
                pids.append(int(environment.parent.name))
    return pids


def _group_is_alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # reaps the leader, which counts as alive until then
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _read_log_line(line: str) -> tuple[int, str]:
    """Level and text of a JSON line, as Stepwell's programs write them; any other line is text of level INFO."""
    try:
        record = orjson.loads(line)
        level = logging.getLevelNamesMapping()[record["level"]]
        return level, "\n".join(str(record[part]) for part in ("message", "exception") if part in record)
    except (ValueError, KeyError, TypeError):
        return logging.INFO, line


async def read_pipe(pipe: IO[bytes]) -> AsyncGenerator[bytes, None]:
    """The chunks of a child's output, until the pipe is closed."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        while chunk := await reader.read(CHUNK):
            yield chunk
    finally:
        transport.close()


async def _read_lines(pipe: IO[bytes], on_line: OnLine) -> None:
    rest = b""
    async with aclosing(read_pipe(pipe)) as chunks:
        async for chunk in chunks:
            *whole, rest = (rest + chunk).split(b"\n")
            rest = rest[:LONGEST_LINE]
            for line in whole:
                on_line(line[:LONGEST_LINE].decode(errors="replace"))
    if rest:
        on_line(rest.decode(errors="replace"))
