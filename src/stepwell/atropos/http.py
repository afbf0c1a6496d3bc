"""The door's HTTP, plain ASGI: what is asked, what is answered, and failures turned into answers in this one place.

What always holds: a long answer is written in pieces, between which others get their turn; its last piece is held back
until whoever made the answer has agreed, so that a client with a whole answer and one without never mistake their case.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import orjson

from stepwell import errors
from stepwell.atropos.bodies import Message, Receive, Unreadable, read_body

Send = Callable[[Message], Awaitable[None]]

STATUS: Mapping[type[errors.StepwellError], int] = {
    errors.BadRequest: 422,
    Unreadable: 400,
    errors.Forbidden: 401,
    errors.Conflict: 409,
    errors.LeaseExpired: 409,
    errors.TooLarge: 413,
    errors.PoolFull: 503,
    errors.PoolUnavailable: 503,
}
"""A full pool is a 503: Atropos' environments try again after a 5xx, and throw their group away after a 4xx."""
RETRY_AFTER = "5"
JSON = "application/json"
PIECE = 2**17
"""Bytes written at once."""


@dataclass(frozen=True, slots=True)
class Request:
    headers: Mapping[str, str]
    query: Mapping[str, str]
    receive: Receive

    async def body(self) -> bytes:
        """To be asked for once."""
        return await read_body(self.receive, self.headers.get("content-encoding", "").strip().lower())

    def wants(self, media_type: str) -> bool:
        return media_type in self.headers.get("accept", "")


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LongAnswer:
    """An answer that is written piece by piece, and that may still be taken back before its last one."""

    parts: Iterator[bytes]
    settle: Callable[[bool], Awaitable[bool]]
    """Told whether the client is there to its end; says whether it may have the rest."""
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


def json_answer(value: Any, status: int = 200) -> Answer:
    return Answer(orjson.dumps(value), status)


def explained(failure: errors.StepwellError) -> Answer:
    status = STATUS.get(type(failure), 500)
    headers = {"retry-after": RETRY_AFTER} if status == 503 else {}
    return Answer(orjson.dumps({"detail": str(failure)}), status, headers=headers)


def takes_zstd(headers: Mapping[str, str]) -> bool:
    """gzip is never used: it takes ten times as long as the writing, and most clients ask for it without a need."""
    return "zstd" in headers.get("accept-encoding", "") and find_spec("zstandard") is not None


async def write(answer: Answer, send: Send) -> None:
    await _begin(send, answer.status, {**_typed(answer), "content-length": str(len(answer.body)), **answer.headers})
    await send({"type": "http.response.body", "body": answer.body})


async def write_long(answer: LongAnswer, receive: Receive, send: Send, *, as_zstd: bool) -> None:
    """Write it to its end, unless the client leaves or the answer is taken back: then it breaks off."""
    watch = asyncio.create_task(_leaving(receive))
    agreed = False
    try:
        headers = {**_typed(answer), **answer.headers, **({"content-encoding": "zstd"} if as_zstd else {})}
        await _begin(send, 200, headers)
        last = b""
        async for piece in _compressed(answer.parts) if as_zstd else _gathered(answer.parts):
            await _body(send, last, more=True)
            last = piece
            if watch.done():
                return
        agreed = await answer.settle(True)
        if agreed:
            await _body(send, last, more=False)
    finally:
        watch.cancel()
        if not agreed:
            await answer.settle(False)


async def _gathered(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Pieces of some size; others get their turn after each. The last one is never all there is."""
    some: list[bytes] = []
    size = 0
    for part in parts:
        if some and size + len(part) > PIECE:  # a part that is long by itself goes as it is, uncopied
            yield b"".join(some)
            await asyncio.sleep(0)
            some, size = [], 0
        some.append(part)
        size += len(part)
    yield b"".join(some[:-1])
    await asyncio.sleep(0)
    yield some[-1]


async def _compressed(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    import zstandard

    stream = zstandard.ZstdCompressor(level=1).compressobj()
    async for piece in _gathered(parts):
        yield await asyncio.to_thread(stream.compress, piece)
    yield stream.flush()


async def _leaving(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _begin(send: Send, status: int, headers: Mapping[str, str]) -> None:
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})


async def _body(send: Send, body: bytes, *, more: bool) -> None:
    if body or not more:
        await send({"type": "http.response.body", "body": body, "more_body": more})


def _typed(answer: Answer | LongAnswer) -> dict[str, str]:
    return {"content-type": answer.content_type}
