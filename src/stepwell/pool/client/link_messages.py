"""What a process and its link to Ray tell each other, over a socket pair that nobody else can reach.

A frame is a header, the number of a call, and a pickled message. Frames without a call have the number 0.
"""

import asyncio
import pickle
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

HEADER = struct.Struct("!QQ")
"""The length of the message, and the number of the call."""
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


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The number of a call and a pickled message. IncompleteReadError if the other side has ended."""
    length, number = HEADER.unpack(await reader.readexactly(HEADER.size))
    return number, await reader.readexactly(length)


def frame(number: int, message: LinkCall | LinkAnswer | LinkState) -> bytes:
    packed = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(packed), number) + packed


def read_frame_blocking(end: socket.socket) -> bytes:
    """The message of the next frame. OSError if there is none in time."""
    length, _ = HEADER.unpack(_receive(end, HEADER.size))
    return _receive(end, length)


def _receive(end: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = end.recv(size - len(received))
        if not part:
            raise ConnectionResetError("the other side has ended")
        received += part
    return received
