"""The program of a child process: loads one reward function and calls it for sample after sample.

What always holds: it ends when its worker ends; it is limited before it loads the function; whatever the function does
short of ending the process comes back as an Attempt; the cell says at any time whose call is running.
"""

import asyncio
import faulthandler
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import BinaryIO, TypeAlias, cast

import orjson

from stepwell.common.die_with_parent import limit_memory, set_parent_death_signal
from stepwell.common.tokenizers import Decode, load_decode
from stepwell.errors import BadRequest
from stepwell.pool.api.scoring import JudgementOutcome
from stepwell.rewards.attempt import Attempt, attempt_of, write_attempt
from stepwell.rewards.blame import blame
from stepwell.rewards.loading import RewardFunction, load
from stepwell.rewards.sample import Sample
from stepwell.rewards.sandbox.job import Job
from stepwell.rewards.sandbox.marking import marked
from stepwell.rewards.sandbox.messages import framed, read_frame, read_frame_from
from stepwell.rewards.sandbox.output import Printed, with_printed
from stepwell.rewards.sandbox.running_call import NOBODY, NUMBER, Cell

Running: TypeAlias = Coroutine[object, object, object]


@dataclass(frozen=True, slots=True)
class Caller:
    """Calls the function, and turns all that can come of it into an Attempt."""

    function: RewardFunction
    decode: Decode
    cell: Cell
    printed: Printed
    timeout: float

    def call(self, message: bytes) -> tuple[Attempt, bool]:
        """For a claimed sample: the attempt, and whether the process can no longer be trusted to have memory."""
        started = time.perf_counter()
        try:
            self.printed.start_call()
            sample = self._sample(message)
            return attempt_of(self.function.call(sample), len(sample.steps), time.perf_counter() - started), False
        except BaseException as failure:  # noqa: BLE001 - someone else's code, of which nothing may get past here
            return self._failed(failure, started)
        finally:
            self.cell.write(NOBODY)

    async def call_async(self, number: int, message: bytes) -> tuple[Attempt, bool]:
        started = time.perf_counter()
        self.printed.start_call()
        limit = asyncio.timeout(self.timeout)
        try:
            sample = self._sample(message)
            async with limit:
                result = await marked(cast("Running", self.function.call(sample)), number, self.cell)
            return attempt_of(result, len(sample.steps), time.perf_counter() - started), False
        except BaseException as failure:  # noqa: BLE001 - as above
            if limit.expired() and isinstance(failure, TimeoutError):
                why = with_printed(f"it took longer than {self.timeout:g} s and was cancelled", self.printed.text())
                return Attempt(JudgementOutcome.TIMEOUT, why=why, seconds=time.perf_counter() - started), False
            return self._failed(failure, started)

    def _sample(self, message: bytes) -> Sample:
        sample: Sample = pickle.loads(message)
        return sample.decoded_by(self.decode)

    def _failed(self, failure: BaseException, started: float) -> tuple[Attempt, bool]:
        why = with_printed(blame(failure), self.printed.text())
        seconds = time.perf_counter() - started
        return Attempt(JudgementOutcome.ERROR, why=why, seconds=seconds), isinstance(failure, MemoryError)


def main() -> None:
    cell_descriptor, parent = map(int, sys.argv[1:])
    set_parent_death_signal(parent, signal.SIGKILL)
    channel = _take_over_channel()
    os.set_inheritable(cell_descriptor, False)
    messages = channel.makefile("rb")
    job: Job = pickle.loads(read_frame_from(messages) or b"")
    faulthandler.enable(file=sys.stderr)
    printed = Printed(sys.stderr)
    printed.start_call()
    sys.stdout = sys.stderr = printed
    try:
        _move_to(job.folder)
        decode = load_decode(job.tokenizer_path)
        limit_memory(job.memory_mb)
        function = load(job.function, job.options)
    except BadRequest as why:
        channel.sendall(framed(orjson.dumps({"why": with_printed(str(why), printed.text())})))
        return
    channel.sendall(framed(orjson.dumps({"name": function.name, "is_async": function.is_async})))
    caller = Caller(function, decode, Cell(cell_descriptor), printed, job.timeout)
    if function.is_async:
        asyncio.run(serve_async(channel, caller))
    else:
        serve(messages, channel, caller)


def _move_to(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as why:
        raise BadRequest(f"the folder of the reward function cannot be used: {why}") from None


def serve(messages: BinaryIO, channel: socket.socket, caller: Caller) -> None:
    while (message := read_frame_from(messages)) is not None:
        number = NUMBER.unpack_from(message)[0]
        if not caller.cell.claim(number):
            continue
        attempt, leaving = caller.call(message[NUMBER.size :])
        channel.sendall(framed(write_attempt(number, attempt, leaving=leaving)))
        if leaving:
            return


async def serve_async(channel: socket.socket, caller: Caller) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    calls: set[asyncio.Task[None]] = set()

    async def answer(message: bytes) -> None:
        number = NUMBER.unpack_from(message)[0]
        attempt, leaving = await caller.call_async(number, message[NUMBER.size :])
        writer.write(framed(write_attempt(number, attempt, leaving=leaving)))
        if leaving:
            writer.close()
            await writer.wait_closed()
            os._exit(0)

    while True:
        try:
            message = await read_frame(reader)
        except (EOFError, OSError):
            return
        call = asyncio.create_task(answer(message))
        calls.add(call)
        call.add_done_callback(calls.discard)


def _take_over_channel() -> socket.socket:
    """The socket that came as stdin, out of the function's reach; stdin is empty from now on."""
    channel = socket.socket(fileno=os.dup(0))
    channel.setblocking(True)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return channel


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # noqa: BLE001 - the worker reads it
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # threads of the function's are not waited for
