"""The program of a child process: loads one reward function and calls it for one sample after another.

- It ends when its worker ends, and sets its limits before it loads the function.
- Whatever the function does becomes an Attempt, unless it ends the process.
- The running-call slot always says whose call is running.
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

from stepwell.common.child import framed, read_frame, read_frame_from
from stepwell.common.own_process import limit_memory, set_parent_death_signal
from stepwell.common.tokenizers import Decode, load_decode
from stepwell.errors import BadRequest
from stepwell.pool.api.scoring import Attempt, JudgementOutcome
from stepwell.rewards.function import RewardFunction, attempt_of, failure_text, write_attempt
from stepwell.rewards.loading import load
from stepwell.rewards.runner.messages import (
    NO_CALL,
    NUMBER,
    CapturedOutput,
    Job,
    RunningCallSlot,
    track_call,
    with_output,
)
from stepwell.rewards.sample import Sample

AsyncCall: TypeAlias = Coroutine[object, object, object]


@dataclass(frozen=True, slots=True)
class FunctionCaller:
    """Calls the function, and turns every result and failure into an Attempt."""

    function: RewardFunction
    decode: Decode
    running_call: RunningCallSlot
    output: CapturedOutput
    timeout: float

    def call(self, message: bytes) -> tuple[Attempt, bool]:
        """Calls the function for a claimed sample: the attempt, and whether the process must end because memory ran
        out."""
        started = time.perf_counter()
        try:
            self.output.start_call()
            sample = self._sample(message)
            return attempt_of(self.function.call(sample), len(sample.steps), time.perf_counter() - started), False
        except BaseException as failure:  # noqa: BLE001 - the author's code may raise anything
            return self._failed(failure, started)
        finally:
            self.running_call.write(NO_CALL)

    async def call_async(self, number: int, message: bytes) -> tuple[Attempt, bool]:
        started = time.perf_counter()
        self.output.start_call()
        limit = asyncio.timeout(self.timeout)
        try:
            sample = self._sample(message)
            async with limit:
                result = await track_call(cast("AsyncCall", self.function.call(sample)), number, self.running_call)
            return attempt_of(result, len(sample.steps), time.perf_counter() - started), False
        except BaseException as failure:  # noqa: BLE001 - the author's code may raise anything
            if limit.expired() and isinstance(failure, TimeoutError):
                why = with_output(f"it took longer than {self.timeout:g} s and was cancelled", self.output.text())
                return Attempt(JudgementOutcome.TIMEOUT, why=why, seconds=time.perf_counter() - started), False
            return self._failed(failure, started)

    def _sample(self, message: bytes) -> Sample:
        sample: Sample = pickle.loads(message)
        return sample.decoded_by(self.decode)

    def _failed(self, failure: BaseException, started: float) -> tuple[Attempt, bool]:
        why = with_output(failure_text(failure), self.output.text())
        seconds = time.perf_counter() - started
        return Attempt(JudgementOutcome.ERROR, why=why, seconds=seconds), isinstance(failure, MemoryError)


def main() -> None:
    slot_descriptor, parent = map(int, sys.argv[1:])
    set_parent_death_signal(parent, signal.SIGKILL)
    channel = _take_channel_from_stdin()
    os.set_inheritable(slot_descriptor, False)
    messages = channel.makefile("rb")
    job: Job = pickle.loads(read_frame_from(messages) or b"")
    faulthandler.enable(file=sys.stderr)
    output = CapturedOutput(sys.stderr)
    output.start_call()
    sys.stdout = sys.stderr = output
    try:
        _change_folder(job.folder)
        decode = load_decode(job.tokenizer_path)
        limit_memory(job.memory_mb)
        function = load(job.function, job.options, sandbox=job.sandbox)
    except BadRequest as why:
        channel.sendall(framed(orjson.dumps({"why": with_output(str(why), output.text())})))
        return
    facts = {"name": function.name, "is_async": function.is_async, "by_step": function.by_step}
    channel.sendall(framed(orjson.dumps(facts)))
    caller = FunctionCaller(function, decode, RunningCallSlot(slot_descriptor), output, job.timeout)
    if function.is_async:
        asyncio.run(serve_async(channel, caller))
    else:
        serve(messages, channel, caller)


def _change_folder(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as why:
        raise BadRequest(f"the folder of the reward function cannot be used: {why}") from None


def serve(messages: BinaryIO, channel: socket.socket, caller: FunctionCaller) -> None:
    while (message := read_frame_from(messages)) is not None:
        number = NUMBER.unpack_from(message)[0]
        if not caller.running_call.claim(number):
            continue
        attempt, is_leaving = caller.call(message[NUMBER.size :])
        channel.sendall(framed(write_attempt(number, attempt, is_leaving=is_leaving)))
        if is_leaving:
            return


async def serve_async(channel: socket.socket, caller: FunctionCaller) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    calls: set[asyncio.Task[None]] = set()

    async def answer(message: bytes) -> None:
        number = NUMBER.unpack_from(message)[0]
        attempt, is_leaving = await caller.call_async(number, message[NUMBER.size :])
        writer.write(framed(write_attempt(number, attempt, is_leaving=is_leaving)))
        if is_leaving:
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


def _take_channel_from_stdin() -> socket.socket:
    """The socket that the worker passed as stdin. Stdin is empty from now on, so the function cannot reach the
    socket."""
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
    os._exit(0)  # does not wait for threads of the function
