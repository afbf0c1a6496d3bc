"""A child process as its worker sees it: started, written to, read from, killed.

- A child is a fresh process, not a fork, and cannot outlive this process.
- Killing it kills what it started. Its end is awaited, so there are no zombies.
"""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import aclosing, suppress
from typing import NamedTuple, TypeAlias

import orjson

from stepwell.common.async_calls import run_to_end
from stepwell.common.processes import exit_text, kill_group, read_pipe
from stepwell.errors import BadRequest, RewardFailed
from stepwell.rewards.runner.messages import Job, framed, read_frame
from stepwell.rewards.runner.output import LONGEST_OUTPUT, NEXT_CALL, with_output
from stepwell.rewards.runner.running_call import NUMBER, RunningCallSlot

Channel: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]

START_TIMEOUT = 120.0
"""Seconds for Python, the tokenizer and the function's imports."""
READ_PAUSE = 0.01
"""Seconds between two reads of a child's output: a child that prints endlessly waits for this process."""
EXIT_TIMEOUT = 1.0
"""Seconds for a child to end by itself, and to read what an ended child has left in its pipes."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "TOKENIZERS_PARALLELISM": "false"}
"""Defaults: a process does the work of one thread, and the memory that threads reserve would count as used."""


class LoadedFunction(NamedTuple):
    name: str
    is_async: bool
    by_step: bool


class RewardChild:
    """Made by `start_child`; whoever gets it closes it."""

    def __init__(
        self, process: subprocess.Popen[bytes], running_call: RunningCallSlot, channel: Channel, output_pipe: int
    ) -> None:
        self.running_call = running_call
        self.reader, self._writer = channel
        self.output = ""
        """The last characters printed since the last call began; complete after the child has ended."""
        self._process = process
        self._reading_output = asyncio.create_task(self._read_output(output_pipe))

    async def greet(self, job: Job) -> LoadedFunction:
        """Sends the job. BadRequest says why the function cannot be loaded."""
        self._writer.write(framed(pickle.dumps(job)))
        try:
            async with asyncio.timeout(START_TIMEOUT):
                reply = orjson.loads(await read_frame(self.reader))
        except TimeoutError:
            raise BadRequest(f"{job.function} was not loaded within {START_TIMEOUT:g} s") from None
        except (EOFError, OSError):
            why = f"loading {job.function} ended the process: {await self.end()}"
            raise BadRequest(with_output(why, self.output)) from None
        if "why" in reply:
            raise BadRequest(reply["why"])
        return LoadedFunction(**reply)

    async def send(self, messages: Iterable[tuple[int, bytes]]) -> None:
        """Pickled samples, each with the number of its attempt."""
        self._writer.write(b"".join(framed(NUMBER.pack(number) + message) for number, message in messages))
        await self._writer.drain()

    def kill(self) -> None:
        if self._process.returncode is None:
            kill_group(self._process)

    async def end(self) -> str:
        """Waits until it has ended, kills it if it has not after a second, and returns how it ended."""
        if self._process.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, EXIT_TIMEOUT)
            kill_group(self._process)
            await asyncio.to_thread(self._process.wait)
            await asyncio.wait([self._reading_output], timeout=EXIT_TIMEOUT)
        code = self._process.returncode
        return exit_text(code) + ("; is the machine out of memory?" if code == -signal.SIGKILL else "")

    async def close(self) -> None:
        """Kills it if it has not ended. A cancelled caller still waits until that is done."""
        await run_to_end(self._close())

    async def _close(self) -> None:
        self.kill()
        await self.end()
        self._reading_output.cancel()
        await asyncio.wait([self._reading_output])
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
        self.running_call.close()

    async def _read_output(self, output_pipe: int) -> None:
        async with aclosing(read_pipe(os.fdopen(output_pipe, "rb", buffering=0))) as chunks:
            async for chunk in chunks:
                output = self.output + chunk.decode(errors="replace")
                self.output = output.rpartition(NEXT_CALL)[2][-LONGEST_OUTPUT:]
                await asyncio.sleep(READ_PAUSE)


async def start_child(job: Job) -> tuple[RewardChild, LoadedFunction]:
    """The child, and what it says of the function. BadRequest if the function cannot be loaded."""
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


def _spawn(channel: Channel, theirs: socket.socket) -> RewardChild:
    """Called in the main thread: the kernel kills the child when the thread that started it ends."""
    running_call = RunningCallSlot.make()
    read_end, write_end = os.pipe()
    arguments = (str(running_call.descriptor), str(os.getpid()))
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stepwell.rewards.runner.child_main", *arguments],
            stdin=theirs.fileno(),
            stdout=write_end,
            stderr=write_end,
            pass_fds=(running_call.descriptor,),
            start_new_session=True,
            env=ENVIRONMENT | os.environ,
        )
    except OSError:
        os.close(read_end)
        running_call.close()
        raise
    finally:
        os.close(write_end)
    return RewardChild(process, running_call, channel, read_end)
