"""What a process and its link to Ray tell each other, over a socket pair that nobody else can reach.

A frame is a header and the parts of a message (see common/message_codec.py). Frames without a call have the number 0.
"""

import asyncio
import socket
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from stepwell.common.message_codec import MOST_ARRAYS, MOST_PACKED, MalformedMessage, pack_message, unpack_message
from stepwell.common.message_format import message
from stepwell.errors import TooLarge

HEADER = struct.Struct("!QQQ")
"""The number of the call, the length of what follows, and the number of its parts: the message and its arrays."""
SIZE = struct.Struct("!Q")
"""Of a part, in bytes. The sizes are before the parts."""
NO_CALL = 0
STATE_INTERVAL = 1.0
"""Seconds between two states of a link, so that its silence is noticed."""
BUFFER = 16 * 2**20
"""Bytes that a stream reads ahead."""
MOST_BYTES = 2**31
"""Of a frame."""


@message
class LinkCall(NamedTuple):
    actor: str
    method: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


@message
class LinkAnswer(NamedTuple):
    value: Any
    failure: Exception | None = None


@message
class LinkState(NamedTuple):
    is_joined: bool
    why: str = ""
    """Why Ray is not joined; or why it may not answer although it is."""
    is_refused: bool = False
    """Ray does not let the link in: trying again does not help."""


STARTING = LinkState(is_joined=False, why="the link to Ray is starting")


async def open_stream(end: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    end.setblocking(False)
    return await asyncio.open_unix_connection(sock=end, limit=BUFFER)


class PackedMessage(NamedTuple):
    parts: int
    body: bytes

    def unpack(self) -> Any:
        """Its arrays are read-only views of the body. MalformedMessage, IncompatibleMessage."""
        view, first = memoryview(self.body), self.parts * SIZE.size
        sizes = struct.unpack(f"!{self.parts}Q", view[:first])
        if first + sum(sizes) != len(view):
            raise MalformedMessage(f"parts of {sum(sizes)} bytes in a frame of {len(view)}")
        return unpack_message([view[start:end] for start, end in pairwise(accumulate(sizes, initial=first))])


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, PackedMessage]:
    """The number of a call and a message. IncompleteReadError if the other side has ended, MalformedMessage."""
    number, length, parts = _read_header(await reader.readexactly(HEADER.size))
    return number, PackedMessage(parts, await reader.readexactly(length))


def frame(number: int, content: LinkCall | LinkAnswer | LinkState) -> list[bytes | memoryview]:
    """In pieces, for `writelines`. TooLarge if the other side would not read it."""
    packed, *arrays = pack_message(content)
    sizes = [len(packed), *map(len, arrays)]
    length, parts = sum(sizes) + SIZE.size * len(sizes), len(sizes)
    if length > MOST_BYTES or parts > MOST_ARRAYS or len(packed) > MOST_PACKED:
        raise TooLarge(f"a message of {length} bytes in {parts} parts is more than a link carries; send less at once")
    return [struct.pack(f"!QQQ{parts}Q", number, length, parts, *sizes) + packed, *arrays]


def read_frame_blocking(end: socket.socket) -> Any:
    """The message of the next frame. OSError if there is none in time."""
    _, length, parts = _read_header(_receive(end, HEADER.size))
    return PackedMessage(parts, _receive(end, length)).unpack()


def _read_header(raw: bytes) -> tuple[int, int, int]:
    number, length, parts = HEADER.unpack(raw)
    if not (0 < parts <= MOST_ARRAYS and parts * SIZE.size <= length <= MOST_BYTES):
        raise MalformedMessage(f"a frame of {length} bytes in {parts} parts")
    return number, length, parts


def _receive(end: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = end.recv(size - len(received))
        if not part:
            raise ConnectionResetError("the other side has ended")
        received += part
    return received
