"""A child process, as its worker holds it: started, written to, read from, killed.

What always holds: a child is a fresh process, not a fork of this one; it cannot outlive this one; killing it kills what
it started; its end is waited for, so that no zombie is left.
"""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import orjson

from stepwell.common.async_calls import run_to_end
from stepwell.common.processes import exit_text, kill_group
from stepwell.errors import BadRequest, RewardFailed
from stepwell.rewards.sandbox.job import Job
from stepwell.rewards.sandbox.messages import framed, read_frame
from stepwell.rewards.sandbox.output import KEPT, NEXT_CALL, with_printed
from stepwell.rewards.sandbox.running_call import NUMBER, Cell

Channel: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]

START_TIMEOUT = 120.0
"""Seconds for Python, the tokenizer and the function's imports."""
READ_PAUSE = 0.01
"""Seconds between two looks at what a child prints: one that prints without end waits for us, not we for it."""
LAST_WORDS = 1.0
"""Seconds for what a dead child has still in its pipes."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "TOKENIZERS_PARALLELISM": "false"}
"""Unless told otherwise: one process is one thread's worth of work, and threads reserve memory that counts."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a child says first."""

    name: str
    is_async: bool


class Child:
    """Made by `start_child`; whoever has it closes it."""

    def __init__(self, process: subprocess.Popen[bytes], cell: Cell, channel: Channel, prints: int) -> None:
        self.cell = cell
        self.reader, self._writer = channel
        self.printed = ""
        """Since the last call began, up to a bound; all of it once the child has ended."""
        self._process = process
        self._listening = asyncio.create_task(self._listen(prints))

    async def greet(self, job: Job) -> Hello:
        """Tell it what it is for; BadRequest says why the function cannot be had."""
        self._writer.write(framed(pickle.dumps(job)))
        try:
            async with asyncio.timeout(START_TIMEOUT):
                said = orjson.loads(await read_frame(self.reader))
        except TimeoutError:
            raise BadRequest(f"{job.function} was not loaded within {START_TIMEOUT:g} s") from None
        except (EOFError, OSError):
            why = f"loading {job.function} ended the process: {await self.end()}"
            raise BadRequest(with_printed(why, self.printed)) from None
        if "why" in said:
            raise BadRequest(said["why"])
        return Hello(**said)

    async def send(self, messages: Iterable[tuple[int, bytes]]) -> None:
        """Pickled samples, each with the number its answer will have."""
        self._writer.write(b"".join(framed(NUMBER.pack(number) + message) for number, message in messages))
        await self._writer.drain()

    def kill(self) -> None:
        if self._process.returncode is None:
            kill_group(self._process)

    async def end(self) -> str:
        """How it ended, in words. Killed if it has not ended by itself."""
        if self._process.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, LAST_WORDS)
            kill_group(self._process)
            await asyncio.to_thread(self._process.wait)
            await asyncio.wait([self._listening], timeout=LAST_WORDS)
        return _exit_text_with_hint(self._process.returncode)

    async def close(self) -> None:
        """Kills it if it has not ended. A cancelled caller still waits until that is done."""
        await run_to_end(self._close())

    async def _close(self) -> None:
        self.kill()
        await self.end()
        self._listening.cancel()
        await asyncio.wait([self._listening])
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
        self.cell.close()

    async def _listen(self, prints: int) -> None:
        """Keeps what was printed since the last call began, up to the bound."""
        reader = asyncio.StreamReader()
        pipe = os.fdopen(prints, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while chunk := await reader.read(2**16):
                self.printed = (self.printed + chunk.decode(errors="replace")).rpartition(NEXT_CALL)[2][-KEPT:]
                await asyncio.sleep(READ_PAUSE)
        finally:
            transport.close()


async def start_child(job: Job) -> tuple[Child, Hello]:
    """BadRequest if the function cannot be had."""
    ours, theirs = socket.socketpair()
    with theirs:
        channel = await asyncio.open_connection(sock=ours)
        try:
            child = _spawn(channel, theirs)
        except OSError as why:
            channel[1].close()
            raise RewardFailed(f"no process could be started for {job.function}: {why}") from None
    try:
        return child, await child.greet(job)
    except BaseException:
        await child.close()
        raise


def _spawn(channel: Channel, theirs: socket.socket) -> Child:
    """In this thread, not in a passing one: the kernel kills the child when the thread that started it ends."""
    cell = Cell.make()
    prints, print_end = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stepwell.rewards.sandbox.child_main", str(cell.descriptor), str(os.getpid())],
            stdin=theirs.fileno(),
            stdout=print_end,
            stderr=print_end,
            pass_fds=(cell.descriptor,),
            start_new_session=True,
            env=ENVIRONMENT | os.environ,
        )
    except OSError:
        os.close(prints)
        cell.close()
        raise
    finally:
        os.close(print_end)
    return Child(process, cell, channel, prints)


def _exit_text_with_hint(code: int) -> str:
    return exit_text(code) + ("; is the machine out of memory?" if code == -signal.SIGKILL else "")
