"""A child process as its worker sees it: a FramedChild whose output is read, and whose running call is known.

A child is a fresh process, not a fork, and cannot outlive this process.
"""

import asyncio
import os
import pickle
import signal
import sys
from collections.abc import Iterable
from contextlib import aclosing
from typing import NamedTuple

import orjson

from stepwell.common.async_calls import run_to_end
from stepwell.common.child import FramedChild
from stepwell.common.processes import exit_text, read_pipe
from stepwell.errors import BadRequest, RewardFailed
from stepwell.rewards.runner.messages import LONGEST_OUTPUT, NEXT_CALL, NUMBER, Job, RunningCallSlot, with_output

START_TIMEOUT = 120.0
"""Seconds for Python, the tokenizer and the function's imports."""
READ_PAUSE = 0.01
"""Seconds between two reads of a child's output: a child that prints endlessly waits for this process."""
EXIT_TIMEOUT = 1.0
"""Seconds for a child to end by itself, and to read what an ended child has left in its pipes."""


class LoadedFunction(NamedTuple):
    name: str
    is_async: bool
    by_step: bool


class RewardChild:
    """Made by `start_child`; whoever gets it closes it."""

    def __init__(self, child: FramedChild, running_call: RunningCallSlot, output_pipe: int) -> None:
        self.running_call = running_call
        self.receive, self.kill = child.receive, child.kill
        self.output = ""
        """The last characters printed since the last call began; complete after the child has ended."""
        self._child = child
        self._reading_output = asyncio.create_task(self._read_output(output_pipe))

    async def greet(self, job: Job) -> LoadedFunction:
        """Sends the job. BadRequest says why the function cannot be loaded."""
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await self._child.send(pickle.dumps(job))
                reply = orjson.loads(await self.receive())
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
        await self._child.send(*(NUMBER.pack(number) + message for number, message in messages))

    async def end(self) -> str:
        """Waits until it has ended, kills it if it has not after a second, and returns how it ended."""
        code = await self._child.end(EXIT_TIMEOUT)
        await asyncio.wait([self._reading_output], timeout=EXIT_TIMEOUT)
        return exit_text(code) + ("; is the machine out of memory?" if code == -signal.SIGKILL else "")

    async def close(self) -> None:
        """Kills it if it has not ended. A cancelled caller still waits until that is done."""
        await run_to_end(self._close())

    async def _close(self) -> None:
        await self._child.close()
        self._reading_output.cancel()
        await asyncio.wait([self._reading_output])
        self.running_call.close()

    async def _read_output(self, output_pipe: int) -> None:
        async with aclosing(read_pipe(os.fdopen(output_pipe, "rb", buffering=0))) as chunks:
            async for chunk in chunks:
                output = self.output + chunk.decode(errors="replace")
                self.output = output.rpartition(NEXT_CALL)[2][-LONGEST_OUTPUT:]
                await asyncio.sleep(READ_PAUSE)


async def start_child(job: Job) -> tuple[RewardChild, LoadedFunction]:
    """The child, and what it says of the function. BadRequest if the function cannot be loaded."""
    running_call = RunningCallSlot.make()
    read_end, write_end = os.pipe()
    slot = running_call.descriptor
    command = (sys.executable, "-P", "-m", "stepwell.rewards.runner.child_main", str(slot), str(os.getpid()))
    try:
        framed = await FramedChild.start(command, output=write_end, pass_fds=(slot,))
    except BaseException as why:
        os.close(read_end)
        running_call.close()
        if isinstance(why, OSError):
            raise RewardFailed(f"no process could be started for {job.function}: {why}") from None
        raise
    finally:
        os.close(write_end)
    child = RewardChild(framed, running_call, read_end)
    try:
        return child, await child.greet(job)
    except BaseException:
        await child.close()
        raise
