"""Two numbers that a worker and its child both see: whose call is running, and up to which sample they are withdrawn.

It outlives the child, so that a death is put down to the sample that caused it and to no other. What always holds: each
side writes one number and reads the other one after that, so a sample that was withdrawn either is not called, or was
seen running.
"""

import mmap
import os
import struct

NOBODY = 0
NUMBER = struct.Struct("<Q")


class Cell:
    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, 2 * NUMBER.size)

    @classmethod
    def make(cls) -> "Cell":
        descriptor = os.memfd_create("stepwell-reward")
        os.ftruncate(descriptor, 2 * NUMBER.size)
        return cls(descriptor)

    def write(self, number: int) -> None:
        NUMBER.pack_into(self._memory, 0, number)

    def read(self) -> int:
        number: int = NUMBER.unpack_from(self._memory)[0]
        return number

    def withdraw(self, last: int) -> int:
        """All up to the last are to be passed over; gives the one whose call is running all the same."""
        NUMBER.pack_into(self._memory, NUMBER.size, last)
        return self.read()

    def claim(self, number: int) -> bool:
        """Written as running, unless it was withdrawn."""
        self.write(number)
        if number > NUMBER.unpack_from(self._memory, NUMBER.size)[0]:
            return True
        self.write(NOBODY)
        return False

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)
