"""HTTP/1.1 by hand: a client that sends any bytes, and says what came back."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

LARGEST_HEAD = 2**20


class ConnectionLost(Exception):
    """The server ended the connection before its answer was complete."""


@dataclass(frozen=True, slots=True)
class HostileAnswer:
    status: int
    headers: Mapping[bytes, bytes]
    """By lower-case name."""
    body: bytes


class PlainConnection:
    """One connection, which is opened again when the server or the protocol has ended it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def ask(self, request: bytes, *, is_head: bool = False, ends: bool = False) -> HostileAnswer:
        """`ends`: nothing follows the request, and the server may say so too."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=LARGEST_HEAD)
        reader, writer = self._streams
        try:
            writer.write(request)
            if ends:
                writer.write_eof()
            answer, is_open = await _read_answer(reader, is_head)
        except (OSError, asyncio.IncompleteReadError) as failure:
            self.close()
            raise ConnectionLost(repr(failure)) from None
        except BaseException:
            self.close()
            raise
        if ends or not is_open:
            self.close()
        return answer


async def _read_answer(reader: asyncio.StreamReader, is_head: bool) -> tuple[HostileAnswer, bool]:
    """The answer, and whether the connection can be used again."""
    status, headers = 100, {}
    while status < 200:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head[:-4].split(b"\r\n")
        status = int(first.split(b" ", 2)[1])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    is_open = headers.get(b"connection", b"").lower() != b"close" and first.startswith(b"HTTP/1.1")
    if is_head or status in (204, 304):
        return HostileAnswer(status, headers, b""), is_open
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        return HostileAnswer(status, headers, await _read_chunks(reader)), is_open
    if b"content-length" in headers:
        return HostileAnswer(status, headers, await reader.readexactly(int(headers[b"content-length"]))), is_open
    return HostileAnswer(status, headers, await reader.read()), False


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")
    return body
