"""Which call is running in a child: two numbers in memory that a worker and its child share.

- The memory outlives the child, so a death is attributed to the sample whose call was running, and to no other.
- Each side writes one number and then reads the other: a withdrawn sample is either not called, or seen running.
"""

import mmap
import os
import struct
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

NO_CALL = 0
NUMBER = struct.Struct("<Q")

T = TypeVar("T")


class RunningCallSlot:
    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, 2 * NUMBER.size)

    @classmethod
    def make(cls) -> "RunningCallSlot":
        descriptor = os.memfd_create("stepwell-reward")
        os.ftruncate(descriptor, 2 * NUMBER.size)
        return cls(descriptor)

    def write(self, number: int) -> None:
        NUMBER.pack_into(self._memory, 0, number)

    def read(self) -> int:
        number: int = NUMBER.unpack_from(self._memory)[0]
        return number

    def withdraw(self, last: int) -> int:
        """The child skips all samples up to `last`, except the one whose call is running; returns that one."""
        NUMBER.pack_into(self._memory, NUMBER.size, last)
        return self.read()

    def claim(self, number: int) -> bool:
        """Marks the sample as running, unless it was withdrawn."""
        self.write(number)
        if number > NUMBER.unpack_from(self._memory, NUMBER.size)[0]:
            return True
        self.write(NO_CALL)
        return False

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


@types.coroutine
def track_call(call: Coroutine[Any, Any, T], number: int, slot: RunningCallSlot) -> Generator[Any, Any, T]:
    """Runs the call. The slot has its number while it holds the event loop, and not while it waits."""
    resume, value = call.send, None
    while True:
        slot.write(number)
        try:
            awaited = resume(value)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            slot.write(NO_CALL)
        try:
            resume, value = call.send, (yield awaited)
        except BaseException as thrown:  # noqa: BLE001 - passed on to the call
            resume, value = call.throw, thrown
