"""What a process and its link to Ray tell each other, over a socket pair that nobody else can reach.

A frame is a header and a pickled message, whose arrays follow it as they are in memory: they are most of a frame, and
pickle would copy them. Frames without a call have the number 0.
"""

import asyncio
import pickle
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

HEADER = struct.Struct("!QQQ")
"""The number of the call, the length of what follows, and the number of its parts: the message and its arrays."""
SIZE = struct.Struct("!Q")
"""Of a part, in bytes. The sizes are before the parts."""
NO_CALL = 0
STATE_INTERVAL = 1.0
"""Seconds between two states of a link, so that its silence is noticed."""
BUFFER = 16 * 2**20
"""Bytes that a stream reads ahead."""


class LinkCall(NamedTuple):
    actor: str
    method: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class LinkAnswer(NamedTuple):
    value: Any
    failure: Exception | None = None


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
        """Its arrays are read-only views of the body."""
        view, at = memoryview(self.body), self.parts * SIZE.size
        pieces: list[memoryview] = []
        for (size,) in SIZE.iter_unpack(view[:at]):
            pieces.append(view[at : at + size])
            at += size
        return pickle.loads(pieces[0], buffers=pieces[1:])


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, PackedMessage]:
    """The number of a call and a message. IncompleteReadError if the other side has ended."""
    number, length, parts = HEADER.unpack(await reader.readexactly(HEADER.size))
    return number, PackedMessage(parts, await reader.readexactly(length))


def frame(number: int, message: LinkCall | LinkAnswer | LinkState) -> list[bytes | memoryview]:
    """In pieces, for `writelines`."""
    arrays: list[pickle.PickleBuffer] = []
    packed = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
    pieces: list[bytes | memoryview] = [packed, *(array.raw() for array in arrays)]
    sizes = b"".join(SIZE.pack(len(piece)) for piece in pieces)
    length = len(sizes) + sum(map(len, pieces))
    return [HEADER.pack(number, length, len(pieces)) + sizes, *pieces]


def read_frame_blocking(end: socket.socket) -> Any:
    """The message of the next frame. OSError if there is none in time."""
    _, length, parts = HEADER.unpack(_receive(end, HEADER.size))
    return PackedMessage(parts, _receive(end, length)).unpack()


def _receive(end: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = end.recv(size - len(received))
        if not part:
            raise ConnectionResetError("the other side has ended")
        received += part
    return received
