"""HTTP of the Atropos server: requests, responses, and the one place where failures become responses.

Invariants:
- A request body takes at most the allowed size in memory, also after decompression.
- A streamed response is written in pieces, and other tasks run between two pieces.
- The last piece of a streamed response is sent only after `settle` agreed. A client that has a whole response can rely
  on it; a client without the last piece knows that it has to ask again.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stepwell import errors
from stepwell.common import listening as cross_site
from stepwell.common.imports import require
from stepwell.wire.scored_groups import read_call

M = TypeVar("M", bound=BaseModel)

MAX_BODY = 256 * 2**20
IN_THREAD = 2**20
"""Bytes from which a body is decompressed or parsed in a thread."""
SMALL_BODY = 2**20
"""Bytes of a call that hands in no groups."""
GZIP = 16 + zlib.MAX_WBITS
FIRST_PIECE, LARGEST_PIECE = 2**10, 2**16
"""Bytes of gzip decompressed at once: at the beginning of a member, and at most. What follows a member's end is copied,
and most members of a hostile body end at once."""
MOST_MEMBERS = 10_000
"""The most members of a gzip body. Clients send one; blocked gzip has one for each 64 KiB."""
ZSTD_PIECE = 1024
"""Bytes decompressed at once: the format lets them become at most some ten megabytes."""
RETRY_AFTER = "5"
JSON = "application/json"
PIECE = 2**17
"""Bytes written at once."""


class Unreadable(errors.BadRequest):
    """The body is not what its Content-Encoding says."""


STATUS: Mapping[type[errors.StepwellError], int] = {
    errors.BadRequest: 422,
    Unreadable: 400,
    errors.Forbidden: 401,
    errors.NotPermitted: 403,
    errors.Conflict: 409,
    errors.LeaseExpired: 409,
    errors.TooLarge: 413,
    errors.PoolFull: 503,
    errors.PoolUnavailable: 503,
    **cross_site.STATUS,
}
"""A full pool is a 503: Atropos' environments retry after a 5xx, and discard their group after a 4xx."""


def json_response(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type=JSON)


def error_response(failure: errors.StepwellError) -> Response:
    response = json_response({"detail": str(failure)}, STATUS.get(type(failure), 500))
    if response.status_code == 503:
        response.headers["retry-after"] = RETRY_AFTER
    return response


# -- requests ----------------------------------------------------------------------------------------------------------


class AtroposRequest(Request):
    def __init__(self, scope: Scope, receive: Receive, max_body: int) -> None:
        super().__init__(scope, receive)
        self._max_body = max_body

    async def call(self, shape: type[M]) -> M:
        """The content of a small body."""
        self._max_body = min(self._max_body, SMALL_BODY)
        return read_call(shape, await self.body())

    async def body(self) -> bytes:
        """Decompressed. Call it once."""
        parts, size = [], 0
        async for part in self.stream():
            size += len(part)
            if size > self._max_body:
                raise _too_large(self._max_body)
            if part:
                parts.append(part)
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("", "identity") or not body:
            return body
        if size > IN_THREAD:
            return await asyncio.to_thread(decompress, body, encoding, self._max_body)
        return decompress(body, encoding, self._max_body)


def decompress(body: bytes, encoding: str, max_body: int) -> bytes:
    if encoding in ("gzip", "x-gzip"):
        pieces = _gunzip(body)
    elif encoding == "zstd":
        pieces = _unzstd(body)
    else:
        raise Unreadable(f"Content-Encoding {encoding!r} is none of gzip, zstd, identity")
    parts, size = [], 0
    for part in pieces:
        if part:
            parts.append(part)
        size += len(part)
        if size > max_body:
            raise _too_large(max_body)
    return b"".join(parts)


def _too_large(max_body: int) -> errors.TooLarge:
    return errors.TooLarge(f"the body is larger than {max_body >> 20} MiB")


def _gunzip(body: bytes) -> Iterator[bytes]:
    """All members, in a time that grows with the body, however many there are."""
    rest, at = memoryview(body), 0
    for _ in range(MOST_MEMBERS):
        stream, begin = zlib.decompressobj(GZIP), at
        while not stream.eof:
            if at == len(body):
                raise Unreadable("the gzip body is cut off")
            piece = rest[at : at + min(max(FIRST_PIECE, at - begin), LARGEST_PIECE)]
            try:
                yield stream.decompress(piece)
            except zlib.error as failure:
                raise Unreadable(f"the body is not gzip: {failure}") from None
            at += len(piece) - len(stream.unused_data)
        if at == len(body):
            return
    raise Unreadable(f"the gzip body has more than {MOST_MEMBERS} members")


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


class StreamedResponse(Response):
    """A response that is written piece by piece and can be withdrawn before its last piece."""

    def __init__(
        self,
        parts: Iterator[bytes],
        settle: Callable[[bool], Awaitable[bool]],
        *,
        media_type: str = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`settle` is called with whether the client is still connected; returns whether the last piece may be sent."""
        self._parts, self._settle = parts, settle
        self.media_type = media_type
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Written to its end. It breaks off if the client leaves or `settle` does not agree."""
        disconnect = asyncio.create_task(_await_disconnect(receive))
        agreed = False
        try:
            pieces = _pieces(self._parts)
            if accepts_zstd(Request(scope)):
                self.headers["content-encoding"] = "zstd"
                pieces = _compressed(pieces)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            last = b""
            async for piece in pieces:
                if last:
                    await send({"type": "http.response.body", "body": last, "more_body": True})
                last = piece
                if disconnect.done():
                    return
            agreed = await self._settle(True)
            if agreed:
                await send({"type": "http.response.body", "body": last})
        finally:
            disconnect.cancel()
            if not agreed:
                await self._settle(False)


def accepts_zstd(request: Request) -> bool:
    """gzip is never used: it takes ten times as long as the writing, and most clients name it without needing it."""
    return "zstd" in request.headers.get("accept-encoding", "") and find_spec("zstandard") is not None


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


async def _compressed(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    import zstandard

    stream = zstandard.ZstdCompressor(level=1).compressobj()
    async for piece in pieces:
        yield await asyncio.to_thread(stream.compress, piece)
    yield stream.flush()


async def _await_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
