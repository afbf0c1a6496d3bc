"""HTTP of the Atropos server in plain ASGI: requests, responses, and the one place where failures become responses.

Invariants:
- A request body takes at most the allowed size in memory, also after decompression.
- A streamed response is written in pieces, and other tasks run between two pieces.
- The last piece of a streamed response is sent only after `settle` agreed. A client that has a whole response can rely
  on it; a client without the last piece knows that it has to ask again.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import orjson

from stepwell import errors
from stepwell.common.optional import require

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY = 256 * 2**20
IN_THREAD = 2**20
"""Bytes from which a body is decompressed or parsed in a thread."""
GZIP = 16 + zlib.MAX_WBITS
ZSTD_PIECE = 1024
"""Bytes decompressed at once: the format lets them become at most some ten megabytes."""
RETRY_AFTER = "5"
JSON = "application/json"
PIECE = 2**17
"""Bytes written at once."""


class Unreadable(errors.BadRequest):
    """The body is not what its Content-Encoding says."""


class ClientGone(Exception):
    """The client left before its request was complete, so nobody waits for a response."""


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
"""A full pool is a 503: Atropos' environments retry after a 5xx, and discard their group after a 4xx."""


@dataclass(frozen=True, slots=True)
class AtroposRequest:
    headers: Mapping[str, str]
    query: Mapping[str, str]
    receive: Receive
    max_body: int = MAX_BODY

    async def body(self) -> bytes:
        """Call it once."""
        encoding = self.headers.get("content-encoding", "").strip().lower()
        return await read_body(self.receive, encoding, self.max_body)

    def accepts(self, media_type: str) -> bool:
        return media_type in self.headers.get("accept", "")


@dataclass(frozen=True, slots=True)
class AtroposResponse:
    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamedResponse:
    """A response that is written piece by piece and can be withdrawn before its last piece."""

    parts: Iterator[bytes]
    settle: Callable[[bool], Awaitable[bool]]
    """Called with whether the client is still connected; returns whether the last piece may be sent."""
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


def json_response(value: Any, status: int = 200) -> AtroposResponse:
    return AtroposResponse(orjson.dumps(value), status)


def error_response(failure: errors.StepwellError) -> AtroposResponse:
    status = STATUS.get(type(failure), 500)
    headers = {"retry-after": RETRY_AFTER} if status == 503 else {}
    return AtroposResponse(orjson.dumps({"detail": str(failure)}), status, headers=headers)


# -- requests ----------------------------------------------------------------------------------------------------------


async def read_body(receive: Receive, encoding: str, max_body: int) -> bytes:
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > max_body:
            raise _too_large(max_body)
        more = message.get("more_body", False)
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    if not encoding or encoding == "identity" or not body:
        return body
    if size > IN_THREAD:
        return await asyncio.to_thread(decompress, body, encoding, max_body)
    return decompress(body, encoding, max_body)


def decompress(body: bytes, encoding: str, max_body: int) -> bytes:
    if encoding in ("gzip", "x-gzip"):
        pieces = _gunzip(body, max_body)
    elif encoding == "zstd":
        pieces = _unzstd(body)
    else:
        raise Unreadable(f"Content-Encoding {encoding!r} is none of gzip, zstd, identity")
    parts, size = [], 0
    for part in pieces:
        parts.append(part)
        size += len(part)
        if size > max_body:
            raise _too_large(max_body)
    return b"".join(parts)


def _too_large(max_body: int) -> errors.TooLarge:
    return errors.TooLarge(f"the body is larger than {max_body >> 20} MiB")


def _gunzip(body: bytes, max_body: int) -> Iterator[bytes]:
    while body:
        stream = zlib.decompressobj(GZIP)
        try:
            yield stream.decompress(body, max_body + 1)
        except zlib.error as failure:
            raise Unreadable(f"the body is not gzip: {failure}") from None
        if not stream.eof and not stream.unconsumed_tail:
            raise Unreadable("the gzip body is cut off")
        body = stream.unused_data


def _unzstd(body: bytes) -> Iterator[bytes]:
    zstandard = require("zstandard", "envs", purpose="zstd", error=Unreadable)
    stream = zstandard.ZstdDecompressor().decompressobj()
    try:
        for start in range(0, len(body), ZSTD_PIECE):
            yield stream.decompress(body[start : start + ZSTD_PIECE])
    except zstandard.ZstdError as failure:
        raise Unreadable(f"the body is not zstd: {failure}") from None
    if not stream.eof or stream.unused_data:
        raise Unreadable("the zstd body is cut off, or continues after its end")


# -- responses ---------------------------------------------------------------------------------------------------------


def accepts_zstd(headers: Mapping[str, str]) -> bool:
    """gzip is never used: it takes ten times as long as the writing, and most clients name it without needing it."""
    return "zstd" in headers.get("accept-encoding", "") and find_spec("zstandard") is not None


async def send_response(response: AtroposResponse, send: Send) -> None:
    headers = {**_content_type(response), "content-length": str(len(response.body)), **response.headers}
    await _send_head(send, response.status, headers)
    await send({"type": "http.response.body", "body": response.body})


async def send_streamed(response: StreamedResponse, receive: Receive, send: Send, *, as_zstd: bool) -> None:
    """Write the response to its end. It breaks off if the client leaves or `settle` does not agree."""
    disconnect = asyncio.create_task(_await_disconnect(receive))
    agreed = False
    try:
        encoding = {"content-encoding": "zstd"} if as_zstd else {}
        await _send_head(send, 200, {**_content_type(response), **response.headers, **encoding})
        last = b""
        async for piece in _compressed(response.parts) if as_zstd else _pieces(response.parts):
            await _send_body(send, last, more=True)
            last = piece
            if disconnect.done():
                return
        agreed = await response.settle(True)
        if agreed:
            await _send_body(send, last, more=False)
    finally:
        disconnect.cancel()
        if not agreed:
            await response.settle(False)


async def _pieces(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Parts joined to pieces; other tasks run after each. There are always at least two pieces."""
    joined: list[bytes] = []
    size = 0
    for part in parts:
        if joined and size + len(part) > PIECE:  # a part that is larger than a piece is sent as it is, not copied
            yield b"".join(joined)
            await asyncio.sleep(0)
            joined, size = [], 0
        joined.append(part)
        size += len(part)
    yield b"".join(joined[:-1])
    await asyncio.sleep(0)
    yield joined[-1]


async def _compressed(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    import zstandard

    stream = zstandard.ZstdCompressor(level=1).compressobj()
    async for piece in _pieces(parts):
        yield await asyncio.to_thread(stream.compress, piece)
    yield stream.flush()


async def _await_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_head(send: Send, status: int, headers: Mapping[str, str]) -> None:
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    if body or not more:
        await send({"type": "http.response.body", "body": body, "more_body": more})


def _content_type(response: AtroposResponse | StreamedResponse) -> dict[str, str]:
    return {"content-type": response.content_type}
