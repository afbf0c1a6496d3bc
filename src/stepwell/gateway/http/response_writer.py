"""Sends a response to one client, whole or in parts, and keeps silent streams alive. It makes no bytes of its own."""

import asyncio
import math
from collections.abc import Callable, Mapping

from stepwell.common.bounded_http import Handover
from stepwell.errors import EngineUnavailable
from stepwell.gateway.requests import Headers, Send
from stepwell.gateway.response_writer import SharedResponse

SILENCE = 15.0
"""Seconds without a byte after which a stream gets a keep-alive; many clients give up after 30 or 60."""
NEVER = math.inf


class ResponseWriter:
    """Sends to one client, and to those that joined its call. What is sent to a client that has left is ignored."""

    __slots__ = (
        "_clock",
        "_send",
        "_shared",
        "first_byte_at",
        "handover",
        "headers",
        "is_ended",
        "is_sent",
        "media_type",
        "status",
        "touched_at",
    )

    def __init__(self, send: Send, clock: Callable[[], float]) -> None:
        self.status = 0
        """0 until something is sent."""
        self.is_ended = False
        """The last part is sent or is being sent."""
        self.is_sent = False
        """The last part was sent to a connection that was open then."""
        self.handover: Handover | None = None
        self.media_type = ""
        """The media type of a stream."""
        self.headers: Headers = []
        """Sent with every answer, in addition."""
        self.touched_at = clock()
        """When something was last sent; NEVER during sending and after the end, when no keep-alive may follow."""
        self.first_byte_at: float | None = None
        self._clock = clock
        self._send = send
        self._shared: SharedResponse | None = None

    def share(self, shared: SharedResponse) -> None:
        """Sends the calls that joined, from now on, what this client gets."""
        self._shared = shared

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        sent = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *self.headers]
        if headers:
            sent += [(name.encode(), value.encode()) for name, value in headers.items()]
        self.touched_at, self.is_ended = NEVER, True
        await self._start(status, sent)
        await self._body(body, more=False)

    async def write(self, data: bytes) -> None:
        """A part of a stream: whole events."""
        self.touched_at = NEVER
        if not self.status:
            await self._start_stream()
        if self.first_byte_at is None:
            self.first_byte_at = self._clock()
        await self._body(data, more=True)
        self.touched_at = self._clock()

    async def end(self, data: bytes) -> None:
        """The last part of a stream."""
        self.touched_at, self.is_ended = NEVER, True
        if not self.status:
            await self._start_stream()
        await self._body(data, more=False)

    def is_open(self) -> bool:
        return self.handover is None or self.handover.is_open()

    async def follow(self, shared: SharedResponse) -> None:
        """Send what another call is answered."""
        more = True
        async for data, more in shared.parts():
            if not self.status:
                await self._start(shared.status, shared.headers)
            self.is_ended = not more
            await self._body(data, more=more)
        if more:
            raise EngineUnavailable("the call that this one repeats was broken off; ask again")

    async def _start_stream(self) -> None:
        media_type = (b"content-type", self.media_type.encode())
        await self._start(
            200, [media_type, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"), *self.headers]
        )

    async def _start(self, status: int, headers: Headers) -> None:
        self.status = status
        if self._shared is not None:
            self._shared.begin(status, headers)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _body(self, data: bytes, *, more: bool) -> None:
        if self._shared is not None:
            self._shared.add(data, more=more)
        is_open = more or self.is_open()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self.is_sent = is_open and not more


class KeepAlives:
    """The open streams. One task serves all of them: a timer for each chunk would cost more than the chunk."""

    def __init__(self, silence: float = SILENCE) -> None:
        self._silence = silence
        self._open: dict[ResponseWriter, Callable[[], bytes]] = {}

    def add(self, writer: ResponseWriter, keep_alive: Callable[[], bytes]) -> None:
        """`keep_alive` makes the bytes to send."""
        self._open[writer] = keep_alive

    def discard(self, writer: ResponseWriter) -> None:
        self._open.pop(writer, None)

    async def run(self) -> None:
        """Send keep-alives to silent streams, until cancelled. A client that does not read delays no other client."""
        clock, sending = asyncio.get_running_loop().time, set[asyncio.Task[None]]()
        while True:
            await asyncio.sleep(self._silence / 3)
            silent_since = clock() - self._silence
            for writer, keep_alive in list(self._open.items()):
                if writer.touched_at <= silent_since:
                    task = asyncio.create_task(_keep_alive(writer, keep_alive))
                    sending.add(task)
                    task.add_done_callback(sending.discard)


async def _keep_alive(writer: ResponseWriter, keep_alive: Callable[[], bytes]) -> None:
    if writer.touched_at != NEVER:
        await writer.write(keep_alive())
