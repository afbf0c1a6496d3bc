"""HTTP connections to engines, with no more than a call needs: every call pays for what is here.

- A connection has one request at a time. It is kept for the next request to the same engine.
- No POST is sent twice, redirects are not followed, and bodies are not decompressed.
- A reply that nobody reads is not received beyond HIGH_WATER bytes.
- One timer looks for silent and idle connections; a timer for each call would cost more.
"""

import asyncio
import ssl
from base64 import b64encode
from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from yarl import URL

from stepwell.errors import BadRequest

KEEP_ALIVE = 4.0
"""Seconds a connection is kept for the next call; vLLM closes its own after 5."""
HIGH_WATER = 2**18
"""Bytes of a reply that are received before they are read."""
MOST_HEAD_BYTES = 2**17
TARGETS = 4_096
"""URLs whose request heads are remembered."""
SERVER_GONE = "Server disconnected"
PLAIN = (b"", b"identity")


class EngineUnreached(Exception):
    """No connection was made: the engine did not get the request."""


class UnreadableReply(Exception):
    """The reply is not the HTTP that an engine speaks."""


class RequestTarget(NamedTuple):
    """A URL as it is asked."""

    place: tuple[str, int, bool]
    """Host, port, and whether it speaks TLS: requests to the same place share connections."""
    head: bytes
    """The head of a request, from its path on, without the length of its body."""


class HttpReply:
    """A reply whose head has arrived. Must be read to its end or closed."""

    __slots__ = ("_connection", "_failure", "_is_complete", "_parts", "_size", "_waiter", "status", "url")

    def __init__(self, connection: "EngineConnection", url: URL) -> None:
        self.status = 0
        self.url = url
        self._connection: EngineConnection | None = connection
        """None once it is free for other requests, or lost."""
        self._parts: list[bytes] = []
        self._size = 0
        self._is_complete = False
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_read(self) -> bool:
        """Whether the reply is read to its end."""
        return self._is_complete and not self._parts

    async def head(self) -> None:
        """Returns when the status is known."""
        while not self.status:
            await self._change()

    async def next_bytes(self) -> bytes:
        """The bytes that have arrived since the last time, at least one; empty at the end."""
        while not self._parts:
            if self._is_complete:
                return b""
            await self._change()
        parts, self._parts, self._size = self._parts, [], 0
        if self._connection is not None:
            self._connection.resume()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read(self) -> bytes:
        """The whole body."""
        parts = []
        while part := await self.next_bytes():
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Drops a connection that has not come to its end, so that the engine notices."""
        if self._connection is not None:
            self._connection.drop(ConnectionAbortedError("the reply was closed"))

    async def _change(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    # -- called by its connection --------------------------------------------------------------------------------------

    def begin(self, status: int) -> None:
        self.status = status
        self._wake()

    def add(self, data: bytes) -> bool:
        """Whether more may come at once."""
        self._parts.append(data)
        self._size += len(data)
        self._wake()
        return self._size < HIGH_WATER

    def end(self, failure: Exception | None) -> None:
        self._connection, self._failure, self._is_complete = None, failure, failure is None
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)


class EngineConnection(asyncio.Protocol):
    """One connection; it belongs to a request, or is idle."""

    def __init__(self, owner: "EngineConnections", place: tuple[str, int, bool]) -> None:
        self.place = place
        self.reply: HttpReply | None = None
        """The reply to the present request; None if the connection is idle."""
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self.touched_at = self._loop.time()
        """When something was last received or sent."""
        self._is_delimited = False
        """The end of the body is known from its head. Otherwise the body ends with the connection."""
        self._head_bytes = 0
        self._is_paused = False
        self._received: list[bytes] = []
        self.on_body = self._received.append
        """Called by the parser for each part of a body."""

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._parser = cast("asyncio.Transport", transport), HttpResponseParser(self)

    def send(self, request: bytes, url: URL) -> HttpReply:
        reply = self.reply = HttpReply(self, url)
        self.touched_at, self._head_bytes = self._loop.time(), 0
        self._transport.write(request)
        return reply

    def resume(self) -> None:
        """Reads on, because all that was received is consumed."""
        if self._is_paused:
            self._is_paused, self.touched_at = False, self._loop.time()
            self._transport.resume_reading()

    def drop(self, failure: Exception) -> None:
        """Close at once."""
        self._transport.abort()
        self._end(failure)

    def is_silent(self, since: float) -> bool:
        return self.touched_at < since and not self._is_paused

    def data_received(self, data: bytes) -> None:
        self.touched_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as failure:
            self.drop(failure.__context__ if isinstance(failure.__context__, UnreadableReply) else _unreadable(failure))
            return
        self._pass_on()
        if self.reply is not None and not self.reply.status:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self.drop(UnreadableReply("its head is too large"))

    def connection_lost(self, failure: Exception | None) -> None:
        is_whole = failure is None and self.reply is not None and self.reply.status and not self._is_delimited
        self._end(None if is_whole else failure or ConnectionResetError(SERVER_GONE))
        self._owner.discard(self)

    def on_message_begin(self) -> None:
        if self.reply is None:
            raise UnreadableReply("a reply to no request")
        self._is_delimited = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._is_delimited = True
        elif name == b"content-encoding" and value.lower() not in PLAIN:
            raise UnreadableReply(f"its body is {value.decode('latin-1')[:40]}, although no encoding is accepted")

    def on_headers_complete(self) -> None:
        if self.reply is not None and (status := self._parser.get_status_code()) >= 200:  # others come before the reply
            self.reply.begin(status)

    def _pass_on(self) -> None:
        """Passes the received part of the body to the reply, which is woken once for many small chunks."""
        if self._received and self.reply is not None:
            has_room = self.reply.add(b"".join(self._received))
            self._received.clear()
            if not has_room and not self._is_paused:
                self._is_paused = True
                self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.reply is None or not self.reply.status:
            return
        self._pass_on()
        is_kept = self._parser.should_keep_alive() and not self._transport.get_write_buffer_size() and self.is_open
        self._end(None)
        self.resume()
        if is_kept:
            self._owner.keep(self)
        else:
            self._transport.close()

    def _end(self, failure: Exception | None) -> None:
        reply, self.reply = self.reply, None
        if reply is not None:
            reply.end(failure)
            self._owner.leave()


class EngineConnections:
    """All connections of one event loop."""

    def __init__(
        self, key: str | None = None, *, limit: int = 256, connect_timeout: float = 30.0, silence: float = 600.0
    ) -> None:
        """Creates connections: at most `limit` requests are in flight; others wait. `silence`: seconds in which
        something must arrive."""
        if key is not None and not key.isprintable():
            raise BadRequest("the key of the engines has characters that no header can carry, such as a line break")
        self._lines = "Accept: */*\r\nAccept-Encoding: identity\r\nContent-Type: application/json\r\n"
        if key is not None:
            self._lines += f"Authorization: Bearer {key}\r\n"
        self._room = asyncio.Semaphore(limit)
        self._connect_timeout = connect_timeout
        self._silence = silence
        self._all: set[EngineConnection] = set()
        self._idle: defaultdict[tuple[str, int, bool], list[EngineConnection]] = defaultdict(list)
        """The one that was used last comes last."""
        self._timer: asyncio.TimerHandle | None = None
        self._target = lru_cache(maxsize=TARGETS)(self._read_target)
        self._tls = lru_cache(maxsize=1)(ssl.create_default_context)

    async def request(self, url: URL, body: bytes | None) -> HttpReply:
        """The reply as soon as its head is there; to a POST, or to a GET without a body.

        EngineUnreached; TimeoutError after silence; OSError if the connection is lost; UnreadableReply.
        """
        place, head = self._target(url)
        if body is not None:
            return await self._send(url, place, b"POST %bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
        request = b"GET %b\r\n" % head
        try:
            return await self._send(url, place, request)
        except ConnectionResetError:  # the engine may have ended a kept connection, and a GET changes nothing
            return await self._send(url, place, request, is_new=True)

    async def _send(self, url: URL, place: tuple[str, int, bool], request: bytes, *, is_new: bool = False) -> HttpReply:
        await self._room.acquire()
        try:
            connection = (None if is_new else self._take_idle(place)) or await self._connect(place)
        except BaseException:
            self.leave()
            raise
        reply = connection.send(request, url)
        try:
            await reply.head()
        except BaseException:
            reply.close()
            raise
        return reply

    def close(self) -> None:
        for connection in list(self._all):
            connection.drop(ConnectionAbortedError("the connections are closed"))
        if self._timer is not None:
            self._timer.cancel()

    def keep(self, connection: EngineConnection) -> None:
        self._idle[connection.place].append(connection)

    def leave(self) -> None:
        """A request is over."""
        self._room.release()

    def discard(self, connection: EngineConnection) -> None:
        """Discards a connection that is lost."""
        self._all.discard(connection)
        idle = self._idle.get(connection.place, [])
        if connection in idle:
            idle.remove(connection)
        if not idle:
            self._idle.pop(connection.place, None)

    def _take_idle(self, place: tuple[str, int, bool]) -> EngineConnection | None:
        idle = self._idle.get(place)
        while idle:
            connection = idle.pop()
            if connection.is_open and not connection.is_silent(asyncio.get_running_loop().time() - KEEP_ALIVE):
                return connection
        return None

    async def _connect(self, place: tuple[str, int, bool]) -> EngineConnection:
        host, port, is_tls = place
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: EngineConnection(self, place), host, port, ssl=self._tls() if is_tls else None
                )
        except TimeoutError:
            raise EngineUnreached(f"no connection to {host}:{port} within {self._connect_timeout:g} s") from None
        except (OSError, UnicodeError) as failure:
            raise EngineUnreached(f"Cannot connect to {host}:{port}: {failure}") from None
        self._all.add(connection)
        if self._timer is None:
            self._watch()
        return connection

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._all):
            if connection.reply is None:
                if connection.is_silent(now - KEEP_ALIVE):
                    connection.drop(TimeoutError("idle"))
            elif connection.is_silent(now - self._silence):
                connection.drop(TimeoutError(f"nothing came for {self._silence:g} s"))
        pause = min(KEEP_ALIVE, self._silence) / 4
        self._timer = loop.call_later(pause, self._watch) if self._all else None

    def _read_target(self, url: URL) -> RequestTarget:
        if url.host is None or url.port is None:
            raise EngineUnreached(f"{url} names no host")
        host = url.raw_host or ""
        name = f"[{host}]" if ":" in host else host
        lines = f"Host: {name}{'' if url.is_default_port() else f':{url.port}'}\r\n{self._lines}"
        if url.user is not None:
            basic = b64encode(f"{url.user}:{url.password or ''}".encode())
            lines += f"Authorization: Basic {basic.decode()}\r\n"
        place = host, url.port, url.scheme == "https"
        return RequestTarget(place, f"{url.raw_path_qs} HTTP/1.1\r\n{lines}".encode())


def _unreadable(failure: Exception) -> UnreadableReply:
    return UnreadableReply(f"its reply is not HTTP: {failure}")
