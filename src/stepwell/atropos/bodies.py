"""What a request brings: read up to a bound, and inflated up to the same bound.

What always holds: no body, however it is compressed, takes more memory than LARGEST_BODY and what it took to send it;
one that is cut off or is no gzip or zstd is Unreadable.
"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from stepwell.errors import BadRequest, TooLarge

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

LARGEST_BODY = 256 * 2**20
TOO_LARGE = f"the body is larger than {LARGEST_BODY >> 20} MiB"
IN_THREAD = 2**20
"""Bytes from which inflating leaves the event loop alone."""
GZIP = 16 + zlib.MAX_WBITS
ZSTD_PIECE = 1024
"""Bytes inflated at once: the format lets them become some ten megabytes at most."""


class Unreadable(BadRequest):
    """A body that is not what its Content-Encoding says."""


class ClientGone(Exception):
    """The client left before its request was whole: no one is there to be answered."""


async def read_body(receive: Receive, encoding: str) -> bytes:
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > LARGEST_BODY:
            raise TooLarge(TOO_LARGE)
        more = message.get("more_body", False)
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    if not encoding or encoding == "identity" or not body:
        return body
    return await asyncio.to_thread(inflate, body, encoding) if size > IN_THREAD else inflate(body, encoding)


def inflate(body: bytes, encoding: str) -> bytes:
    inflaters: dict[str, Callable[[bytes], Iterator[bytes]]] = {"gzip": _gunzip, "x-gzip": _gunzip, "zstd": _unzstd}
    inflater = inflaters.get(encoding)
    if inflater is None:
        raise Unreadable(f"Content-Encoding {encoding!r} is none of gzip, zstd, identity")
    parts, size = [], 0
    for part in inflater(body):
        parts.append(part)
        size += len(part)
        if size > LARGEST_BODY:
            raise TooLarge(TOO_LARGE)
    return b"".join(parts)


def _gunzip(body: bytes) -> Iterator[bytes]:
    while body:
        stream = zlib.decompressobj(GZIP)
        try:
            yield stream.decompress(body, LARGEST_BODY + 1)
        except zlib.error as failure:
            raise Unreadable(f"this is no gzip: {failure}") from None
        if not stream.eof and not stream.unconsumed_tail:
            raise Unreadable("the gzip body is cut off")
        body = stream.unused_data


def _unzstd(body: bytes) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise Unreadable("zstd needs zstandard; pip install 'stepwell[envs]'") from None
    stream = zstandard.ZstdDecompressor().decompressobj()
    try:
        for start in range(0, len(body), ZSTD_PIECE):
            yield stream.decompress(body[start : start + ZSTD_PIECE])
    except zstandard.ZstdError as failure:
        raise Unreadable(f"this is no zstd: {failure}") from None
    if not stream.eof or stream.unused_data:
        raise Unreadable("the zstd body is cut off, or goes on after its end")
