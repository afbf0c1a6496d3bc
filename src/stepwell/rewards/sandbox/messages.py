"""Messages between a worker and its children: a length, then so many bytes, over a socket.

Samples go to the child pickled. What comes back was written by a process that runs someone else's code, so it is JSON.
"""

import asyncio
import struct
from typing import BinaryIO

LENGTH = struct.Struct("<I")


def framed(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """IncompleteReadError at the end."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(length)


def read_frame_from(file: BinaryIO) -> bytes | None:
    """None at the end."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return file.read(LENGTH.unpack(head)[0])
