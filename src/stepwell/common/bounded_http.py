"""HTTP connections that cannot be held open, or fed for ever, by someone who has no key.

uvicorn bounds neither the headers of a request nor the time that a client takes to send it.
"""

import select
from asyncio import TimerHandle, Transport
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LARGEST_HEADERS = 64 * 1024
"""Bytes of all headers that an application accepts."""
MOST_HEADER_BYTES = 2 * LARGEST_HEADERS
"""Bytes that are read before headers end: an application's own refusal, which says why, comes first."""
MOST_HEADERS = 256
"""Each takes a microsecond to parse, however short it is."""
UNWANTED_BYTES_A_SECOND = 64 * 1024 * 1024
"""The rate at which all bodies of refused calls are read. They are read so that a client which sends first and then
reads gets its answer, but not as fast as they come."""
LATE_SECONDS = 1.0
"""The wait before a refused connection is closed. Nothing more is read from it, and its client does not come back
sooner."""
HEADER_SECONDS = 30.0
"""The most seconds from the connection, or the first byte of a request, to the end of its headers."""
SILENT_SECONDS = 60.0
"""The most seconds between two parts of a body."""
BODY_SECONDS = 600.0
"""The most seconds for a whole body."""
MOST_CONNECTIONS = 50_000
WHEN_GONE = "stepwell.when_gone"
"""An extension in a request's ASGI scope: a function. What it is given is called if the client leaves."""
HANDOVER = "stepwell.handover"
"""An extension in a request's ASGI scope: a Handover."""
HUNG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
WHY_TOO_LARGE = b"a request has at most %d headers, of %d KiB together" % (MOST_HEADERS, LARGEST_HEADERS >> 10)
HEADERS_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n"
    b"connection: close\r\n\r\n%b" % (len(WHY_TOO_LARGE), WHY_TOO_LARGE)
)


class TooManyHeaders(Exception):
    """Ends the parsing at once."""


class UnwantedBytes:
    """The budget for unwanted bytes, of all connections of a process."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def pause(self, size: int, now: float) -> float:
        """Seconds until a connection that has sent so many bytes may send more."""
        self._free_at = max(self._free_at, now) + size / UNWANTED_BYTES_A_SECOND
        return self._free_at - now


UNWANTED = UnwantedBytes()


def _when_gone(connection: "ref[BoundedHttp]", on_gone: Callable[[], object]) -> Callable[[], None]:
    """During a request: its server keeps the connection until the answer is complete."""
    found = connection()
    assert found is not None, "the request is over"
    return found.when_gone(on_gone)


class Handover:
    """A view of what became of the bytes of an answer. It is valid only during a request."""

    def __init__(self, connection: "ref[BoundedHttp]") -> None:
        self._connection = connection

    def is_open(self) -> bool:
        """False as soon as the kernel knows that the client has left, which the event loop may not know yet."""
        found = self._connection()
        return found is not None and found.is_open()

    def unsent(self) -> int | None:
        """Bytes that the kernel has not taken yet; None if the connection broke before it took all."""
        found = self._connection()
        return None if found is None or found.is_broken else found.transport.get_write_buffer_size()


class BoundedHttp(HttpToolsProtocol):
    """Closes a connection whose request is too slow, or whose headers are too large or too many. The body of a refused
    request is read slowly."""

    header_seconds = HEADER_SECONDS
    silent_seconds = SILENT_SECONDS
    body_seconds = BODY_SECONDS
    late_seconds = LATE_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reads_headers = True
        self._reads_body = False
        self._is_refused = False
        self._header_bytes = self._header_count = 0
        self._since = self._touched_at = 0.0
        self._check: TimerHandle | None = None
        self._on_gone: Callable[[], object] | None = None
        self.is_broken = False
        """The connection ended with an error, so that the data to be sent may not have been."""
        self._extensions: Any = {WHEN_GONE: partial(_when_gone, ref(self)), HANDOVER: Handover(ref(self))}
        """The extensions in the scope of each request, which the connection keeps. They must not keep the connection:
        both would stay until the garbage collector comes."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._check = self.loop.call_later(self.header_seconds, self._close_if_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._check is not None:
            self._check.cancel()
        self.is_broken = exc is not None
        super().connection_lost(exc)
        if self._on_gone is not None:
            self._on_gone()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._touched_at = self.loop.time()
        super().data_received(data)
        if self._reads_headers:
            self._header_bytes += len(data)
            if self._header_bytes > MOST_HEADER_BYTES:
                self._refuse(HEADERS_TOO_LARGE)
        elif self._reads_body and self.cycle.response_complete:
            self.flow.pause_reading()
            self.loop.call_later(UNWANTED.pause(len(data), self._touched_at), self._read_on)

    def send_400_response(self, msg: str) -> None:
        """When the request could not be parsed."""
        if self._header_count > MOST_HEADERS:
            self._refuse(HEADERS_TOO_LARGE)
        else:
            super().send_400_response(msg)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _refuse(self, answer: bytes) -> None:
        """A client that was refused at once would connect again at once."""
        if self._is_refused:
            return
        self._is_refused = True
        self.flow.pause_reading()
        if self._check is not None:
            self._check.cancel()
        self._check = self.loop.call_later(self.late_seconds, self._close, answer)

    def _close(self, answer: bytes) -> None:
        self.transport.write(answer)
        self.transport.close()

    def on_message_begin(self) -> None:
        if not self._reads_headers:
            self._reads_headers, self._header_bytes, self._header_count = True, 0, 0
            self._since = self._touched_at
        super().on_message_begin()
        self.scope["extensions"] = self._extensions

    def when_gone(self, on_gone: Callable[[], object]) -> Callable[[], None]:
        """Returns a function that ends it. If the connection's next request has begun by then, its own stays."""
        self._on_gone = on_gone
        if self.transport.is_closing():
            self.loop.call_soon(on_gone)
        else:
            self.flow.resume_reading()  # otherwise a client that leaves is not noticed

        def stop_watching() -> None:
            if self._on_gone is on_gone:
                self._on_gone = None

        return stop_watching

    def is_open(self) -> bool:
        if self.transport.is_closing():
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), HUNG_UP)
        return not poll.poll(0)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        if self._header_count > MOST_HEADERS:
            raise TooManyHeaders
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._reads_headers, self._reads_body, self._since = False, True, self._touched_at
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._reads_body = False
        super().on_message_complete()

    def _close_if_slow(self) -> None:
        now = self.loop.time()
        if self._reads_headers:
            left = self.header_seconds - (now - self._since)
        elif self._reads_body:
            left = min(self.silent_seconds - (now - self._touched_at), self.body_seconds - (now - self._since))
        else:
            left = self.header_seconds
        if left <= 0:
            self.transport.abort()
        else:
            self._check = self.loop.call_later(max(left, 0.05), self._close_if_slow)
