"""An answer on its way to the agent, whole or piece by piece, and the comments that keep a silent one alive."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from stepwell.errors import EngineUnavailable, StepwellError
from stepwell.gateway.dialects.sse import DONE, KEEP_ALIVE
from stepwell.gateway.http.deduplication import SharedResponse
from stepwell.gateway.http.error_responses import explained

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
SILENCE = 15.0
"""Seconds after which a client is told that its stream still lives; many give up after 30 or 60."""
NEVER = math.inf


class ResponseWriter:
    """Towards one client, and towards those who joined its call. What a client that is gone is sent, is ignored."""

    __slots__ = ("_clock", "_send", "_shared", "first_byte_at", "status", "touched_at")

    def __init__(self, send: Send, clock: Callable[[], float]) -> None:
        self.status = 0
        """0 until something was sent."""
        self.touched_at = clock()
        """When something was last sent; NEVER while it is being sent, and after the end: no comment may follow it."""
        self.first_byte_at: float | None = None
        self._clock = clock
        self._send = send
        self._shared: SharedResponse | None = None

    def share(self, shared: SharedResponse) -> None:
        """From now on, those who joined get what this client gets."""
        self._shared = shared

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        sent = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if headers:
            sent += [(name.encode(), value.encode()) for name, value in headers.items()]
        self.touched_at = NEVER
        await self.begin(status, sent)
        await self._body(body, more=False)

    async def write(self, data: bytes) -> None:
        """A piece of a stream: whole events."""
        self.touched_at = NEVER
        if not self.status:
            await self.begin(200, STREAM_HEADERS)
        if self.first_byte_at is None:
            self.first_byte_at = self._clock()
        await self._body(data, more=True)
        self.touched_at = self._clock()

    async def keep_alive(self) -> None:
        if self.touched_at != NEVER:
            await self.write(KEEP_ALIVE)

    async def end(self, data: bytes = DONE) -> None:
        """The last piece of a stream."""
        self.touched_at = NEVER
        if not self.status:
            await self.begin(200, STREAM_HEADERS)
        await self._body(data, more=False)

    async def fail(self, failure: StepwellError) -> None:
        """As an HTTP error; in a stream that has begun, as an error event."""
        status, body, headers = explained(failure)
        if self.status:
            await self.end(b"data: " + body + b"\n\n" + DONE)
        else:
            await self.whole(status, body, headers)

    async def begin(self, status: int, headers: Headers) -> None:
        self.status = status
        if self._shared is not None:
            self._shared.begin(status, headers)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _body(self, data: bytes, *, more: bool) -> None:
        if self._shared is not None:
            self._shared.add(data, more=more)
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def follow(self, shared: SharedResponse) -> None:
        """Answer with what another call answers."""
        more = True
        async for data, more in shared.parts():
            if not self.status:
                await self.begin(shared.status, shared.headers)
            await self._body(data, more=more)
        if more:
            raise EngineUnavailable("the call that this one repeats was broken off; ask again")


class KeepAlives:
    """Streams that are open now. One task for all of them: a timer for each chunk would cost more than the chunk."""

    def __init__(self) -> None:
        self._open: set[ResponseWriter] = set()

    def add(self, answer: ResponseWriter) -> None:
        self._open.add(answer)

    def discard(self, answer: ResponseWriter) -> None:
        self._open.discard(answer)

    async def run(self, silence: float = SILENCE) -> None:
        """Comment on those that are silent, until cancelled. A client that does not read holds up no other's."""
        clock, comments = asyncio.get_running_loop().time, set[asyncio.Task[None]]()
        while True:
            await asyncio.sleep(silence / 3)
            for answer in self._silent_since(clock() - silence):
                comment = asyncio.create_task(answer.keep_alive())
                comments.add(comment)
                comment.add_done_callback(comments.discard)

    def _silent_since(self, moment: float) -> Iterable[ResponseWriter]:
        return [answer for answer in self._open if answer.touched_at <= moment]
