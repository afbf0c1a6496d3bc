"""A proxy that breaks a share of the calls, and knows which answers were handed over in whole all the same.

Bytes are relayed as they come, one call a connection. Whoever leaves is only half closed towards the server: what the
server had written until it noticed still arrives here.
"""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from rig.texts import text_of

CHAT, GENERATE = "/chat/completions", "/inference/v1/generate"
LATEST = 0.15
"""Seconds after the request at which a connection is cut in the midst, at most."""
LONGEST_HEAD = 2**16
CONNECTION = re.compile(rb"\r\nconnection:[^\r]*", re.IGNORECASE)
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Break(StrEnum):
    BEFORE = "before"
    """The connection is cut, and the server gets no request."""
    REFUSED = "refused"
    """The answer is 503, and the server gets no request."""
    MIDST = "midst"
    """The connection is cut at a random moment after the request."""
    AFTER = "after"
    """The whole answer is here. The connection is cut before its last bytes are passed on."""
    FAILED = "failed"
    """The whole answer is here, and 503 is passed on instead."""
    HELD = "held"
    """The whole answer is here. It is passed on after the client's timeout."""


BEFORE_THE_END = (Break.BEFORE, Break.REFUSED, Break.MIDST)
HANDED_OVER = (Break.AFTER, Break.FAILED, Break.HELD)


def shuffled(breaks: Sequence[Break], chance: random.Random) -> Iterator[Break]:
    """Without end, each as often as the others."""
    while True:
        yield from chance.sample(breaks, len(breaks))


@dataclass(slots=True)
class Relayed:
    """An answer that did not come to its end, or that the proxy broke."""

    path: str
    dealt: Break | None
    left_after: int | None
    """The bytes that had come when the client left; None if it stayed."""
    was_reset: bool
    """By the server."""
    answer: bytes


@dataclass(slots=True)
class BreakingProxy:
    """Open it with `async with`; `url` is valid inside."""

    breaks: Iterator[Break]
    share: float
    """Of the calls that are broken."""
    held: float
    """Seconds for which answers are kept back."""
    chance: random.Random
    server: str = ""
    """The URL; to be set before the first request."""
    url: str = ""
    whole: set[str] = field(default_factory=set)
    """The texts of the chat answers whose last byte the server has handed over."""
    broken: Counter[Break] = field(default_factory=Counter)
    unusual: list[Relayed] = field(default_factory=list)
    _listening: asyncio.Server | None = None
    _serving: "set[asyncio.Task[None]]" = field(default_factory=set)

    async def __aenter__(self) -> Self:
        self._listening = await asyncio.start_server(self._begin, "127.0.0.1", 0, limit=LONGEST_HEAD)
        self.url = f"http://127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._listening is not None
        self._listening.close()
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = LENGTH.search(head)
            body = await reader.readexactly(int(length[1])) if length else b""
            request = CONNECTION.sub(b"", head)[:-2] + b"Connection: close\r\n\r\n" + body
            path = head.split(b" ", 2)[1].decode()
            is_broken = path.endswith((CHAT, GENERATE)) and self.chance.random() < self.share
            dealt = next(self.breaks) if is_broken else None
            if dealt is not None:
                self.broken[dealt] += 1
            await self._answer(request, path, dealt, reader, writer)
        writer.close()

    async def _answer(
        self,
        request: bytes,
        path: str,
        dealt: Break | None,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if dealt is Break.BEFORE:
            writer.transport.abort()
            return
        if dealt is Break.REFUSED:
            writer.write(REFUSAL)
            return
        relayed = Relayed(path, dealt, None, False, b"")
        await self._relay(request, relayed, reader, writer)
        answer = relayed.answer
        text = text_of(body_of(answer)) if path.endswith(CHAT) else None
        if text is not None:
            self.whole.add(text)
        if dealt is not None or text is None:
            self.unusual.append(relayed)
        if dealt is Break.AFTER:
            writer.transport.abort()
        elif dealt is Break.FAILED:
            writer.write(REFUSAL)
        elif dealt is Break.HELD:
            await asyncio.sleep(self.held)
            writer.write(answer)

    async def _relay(
        self, request: bytes, relayed: Relayed, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Reads all that comes from the server. It is passed on, unless it is to be kept back."""
        address = urlsplit(self.server)
        from_server, to_server = await asyncio.open_connection(address.hostname, address.port)
        to_server.write(request)
        dealt, answer, kept = relayed.dealt, bytearray(), b""

        def leave() -> None:
            relayed.left_after = len(answer)
            if not to_server.is_closing():
                to_server.write_eof()

        def left(_: "asyncio.Task[bytes]") -> None:
            leave()

        def cut() -> None:
            writer.transport.abort()
            leave()

        leaving = asyncio.create_task(reader.read(1))  # ends when the client leaves
        leaving.add_done_callback(left)
        cutting = asyncio.get_running_loop().call_later(self.chance.uniform(0, LATEST), cut)
        if dealt is not Break.MIDST:
            cutting.cancel()
        try:
            while data := await from_server.read(LONGEST_HEAD):
                answer += data
                if dealt is Break.AFTER:
                    kept, data = data, kept
                if dealt not in (Break.FAILED, Break.HELD) and not writer.is_closing():
                    writer.write(data)
        except ConnectionResetError:
            relayed.was_reset = True
        finally:
            cutting.cancel()
            leaving.remove_done_callback(left)
            leaving.cancel()
            to_server.close()
            relayed.answer = bytes(answer)


def body_of(answer: bytes) -> bytes:
    """Of a whole answer; empty if it is not whole."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        return b""
    if length := LENGTH.search(head):
        return rest if len(rest) == int(length[1]) else b""
    parts = list[bytes]()
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        if size == b"0":
            return b"".join(parts)
        parts.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return b""
