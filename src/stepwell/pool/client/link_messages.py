"""What a process and its link to Ray tell each other, and the messages to shards that processes of a link share.

- A frame is a header and the parts of a message (see common/message_codec.py). Frames without a call have the number 0.
- A call to an actor costs about the same whatever it carries. So a message to a shard holds what came while the one
  before it was under way, but for large ones, and a shard gets one at a time. An operation leaves at once if no message
  is under way: under load the messages grow instead of their number.
- What a shard cannot read fails alone: the others of its message are sent again.
"""

import asyncio
import socket
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from stepwell.common.async_calls import BatchSender
from stepwell.common.message_codec import MOST_ARRAYS, MOST_PACKED, MalformedMessage, pack_message, unpack_message
from stepwell.common.message_format import message
from stepwell.errors import BadRequest, PoolUnavailable, TooLarge
from stepwell.pool.api.transport import ActorAway, ActorMissing, ActorTransport, News, Seen
from stepwell.pool.client.shards import SharedQuestion
from stepwell.pool.shard.operation import Operation

HEADER = struct.Struct("!QQQ")
"""The number of the call, the length of what follows, and the number of its parts: the message and its arrays."""
SIZE = struct.Struct("!Q")
"""The size of a part, in bytes. The sizes are before the parts."""
NO_CALL = 0
STATE_INTERVAL = 1.0
"""Seconds between two states of a link, so that its silence is noticed."""
BUFFER = 16 * 2**20
"""Bytes that a stream reads ahead."""
MOST_BYTES = 2**31
"""The most bytes of a frame."""

LARGEST_MESSAGE = 4 * 2**20
"""Bytes, unless a single process sends more."""
MESSAGE_TIMEOUT = 30.0
"""Seconds that a message may take: as long as a client waits for it. The ones behind it do not wait for longer."""
MOST_TOPICS = 1_000
"""In a question of one process."""


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


class GatheringTransport:
    """Implements ActorTransport."""

    def __init__(self, transport: ActorTransport, *, timeout: float = MESSAGE_TIMEOUT) -> None:
        self._transport = transport
        self._timeout = timeout
        self._senders: dict[tuple[str, int | None], BatchSender[Sequence[Any], list[Any]]] = {}
        """By shard and revision of the plan."""
        self._questions: dict[str, SharedQuestion] = {}
        """By shard: what all processes wait for."""

    @property
    def connections(self) -> int:
        return self._transport.connections

    async def call(self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if method == "wait_news":
            return await self._question(actor).wait(*_checked(*args))
        if method != "run":
            return await self._transport.call(actor, method, args, kwargs)
        (operations,) = args
        if not all(isinstance(operation, Operation) for operation in operations):
            raise BadRequest("a message to a shard is a list of operations")
        sender = self._senders.get((actor, kwargs.get("revision")))
        if sender is None:
            sender = self._new_sender(actor, kwargs)
        return await sender.submit(operations)

    def _question(self, shard: str) -> SharedQuestion:
        async def ask(asker: str, seen: Seen, timeout: float) -> News:
            try:
                async with asyncio.timeout(timeout + self._timeout):
                    news: News = await self._transport.call(shard, "wait_news", (asker, seen, timeout), {})
            except TimeoutError:
                raise ActorAway(f"no answer within {timeout + self._timeout:.0f} s") from None
            return news

        if shard not in self._questions:
            self._questions[shard] = SharedQuestion(ask)
        return self._questions[shard]

    def _new_sender(self, shard: str, kwargs: Mapping[str, Any]) -> BatchSender[Sequence[Any], list[Any]]:
        async def send_one(message: Sequence[Any]) -> list[Any] | Exception:
            try:
                answers = await self._run(shard, message, kwargs)
            except Exception as failure:  # noqa: BLE001 - whoever sent it gets it
                return failure
            return answers

        async def send(messages: list[Sequence[Any]]) -> Sequence[list[Any] | Exception]:
            joined = [operation for message in messages for operation in message]
            try:
                answers = iter(await self._run(shard, joined, kwargs))
            except (ActorAway, ActorMissing, PoolUnavailable):
                raise
            except Exception:
                if len(messages) == 1:
                    raise
                return await asyncio.gather(*map(send_one, messages))
            return [[next(answers) for _ in message] for message in messages]

        sender = BatchSender[Sequence[Any], list[Any]](send, weigh=_weight, max_weight=LARGEST_MESSAGE)
        self._senders[shard, kwargs.get("revision")] = sender
        return sender

    async def _run(self, shard: str, operations: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        try:
            async with asyncio.timeout(self._timeout):
                answers: list[Any] = await self._transport.call(shard, "run", (operations,), kwargs)
        except TimeoutError:
            raise ActorAway(f"no answer within {self._timeout:g} s") from None
        return answers


def _checked(asker: str, seen: Seen, timeout: float) -> tuple[str, Seen, float]:
    """The questions of other processes are sent with this one."""
    texts = [asker, *seen, *(revision.epoch for revision in seen.values())]
    numbers = [timeout, *(revision.number for revision in seen.values())]
    if len(seen) > MOST_TOPICS or {*map(type, texts)} != {str} or not {int, float}.issuperset(map(type, numbers)):
        raise BadRequest("a question for news has topics with their revisions, and a time")
    return asker, seen, timeout


def _weight(operations: Sequence[Any]) -> int:
    return sum(operation.nbytes for operation in operations)
