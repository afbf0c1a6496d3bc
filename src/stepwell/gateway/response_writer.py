"""The response to a call on its way to its clients: sent whole or in parts, shared with repeated calls, read or not.

- Two calls are the same if they have the same Idempotency-Key, or the same body while the first is in flight: a retry
  joins the call that is in flight, or gets its stored answer. The second rule does not apply to a request that says it
  is a first try (OpenAI's SDKs do, in x-stainless-retry-count): an agent may send the same request several times at
  once and want several answers.
- An answer is read when its last byte was handed over to a connection that was open then. It has several readers if
  repeated calls get it too, at once or later; one who read it is enough. One whose end was an error was read by nobody.
- A stream that is silent is kept alive.
"""

import asyncio
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from stepwell.common.bounded_http import HANDOVER, Handover
from stepwell.errors import EngineUnavailable
from stepwell.gateway.requests import Headers, Message, Send
from stepwell.pool.api.producing import READ
from stepwell.steps.trainable import UNSEEN

LOOK_INTERVAL = 0.05
STALLED_SECONDS = 60.0
"""A client that takes no byte of its answer for so long does not read it."""
KEPT_SECONDS = 600.0
KEPT_ANSWERS = 10_000
KEPT_BYTES = 64 * 1024 * 1024
"""Bytes of all kept answers."""
KEPT_OF_A_CALLER = KEPT_BYTES // 8
"""Bytes of the kept answers to one caller, so that nobody pushes out those of all others."""
AN_ANSWER, A_PART = 2_000, 150
"""Bytes that a kept answer, and each of its parts, take beside the body."""
SILENCE = 15.0
"""Seconds without a byte after which a stream gets a keep-alive; many clients give up after 30 or 60."""
NEVER = math.inf


def handover_of(scope: Message) -> Handover | None:
    """None under another server than the gateway's own. There, what was sent counts as read."""
    return (scope.get("extensions") or {}).get(HANDOVER)


async def is_handed_over(handover: Handover | None, stalled_seconds: float = STALLED_SECONDS) -> bool:
    """Waits until the kernel has taken all that was sent."""
    unsent = handover.unsent() if handover is not None else 0
    left = stalled_seconds
    while handover is not None and unsent and left > 0:
        await asyncio.sleep(LOOK_INTERVAL)
        before, unsent = unsent, handover.unsent()
        left = stalled_seconds if unsent is not None and unsent < before else left - LOOK_INTERVAL
    return unsent == 0


@dataclass(slots=True, eq=False)
class Sighting:
    """Whether anybody has read one answer."""

    mark: Callable[[Sequence[str], str], object]
    """Marks steps by their uids."""
    uids: Sequence[str] = ()
    """The uids of the answer's steps, once they are recorded."""
    is_whole: bool = False
    """Whether the answer was sent to its end, and is not an error."""
    is_read: bool = False
    is_unseen: bool = False
    """Whether the answer was marked as unseen."""

    def note(self, *, is_read: bool) -> None:
        """One client has read it, or has not."""
        if not self.uids or self.is_read:
            return
        self.is_read = is_read and self.is_whole
        if self.is_read and self.is_unseen:
            self.mark(self.uids, READ)
        elif not self.is_read and not self.is_unseen:
            self.is_unseen = True
            self.mark(self.uids, UNSEEN)


@dataclass(slots=True, eq=False)
class SharedResponse:
    """The answer that a call has got so far, and how many clients wait for it."""

    on_deserted: Callable[[], object]
    """Called when no client waits any more."""
    status: int = 0
    headers: Headers = field(default_factory=list)
    listeners: int = 1
    ended: bool = False
    size: int = AN_ANSWER
    caller: str = ""
    """The caller whose call is answered."""
    kept_until: float = 0.0
    sighting: Sighting | None = None
    uid: str = ""
    """The uid of the call that is answered."""
    _parts: list[tuple[bytes, bool]] = field(default_factory=list)
    _news: "asyncio.Future[None] | None" = None

    def begin(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers

    def add(self, data: bytes, *, more: bool) -> None:
        self._parts.append((data, more))
        self.size += len(data) + A_PART
        self.ended = self.ended or not more
        self._wake()

    def leave(self) -> None:
        """One client has left."""
        self.listeners -= 1
        if self.listeners == 0 and not self.ended:
            self.on_deserted()

    def give_up(self) -> None:
        """Nothing more will come."""
        self.ended = True
        self._wake()

    async def parts(self) -> AsyncIterator[tuple[bytes, bool]]:
        """The whole response from its beginning, as it arrives: data, and whether more follows."""
        sent = 0
        while True:
            for part in self._parts[sent:]:
                sent += 1
                yield part
            if self.ended and sent == len(self._parts):
                return
            if sent == len(self._parts):
                if self._news is None:
                    self._news = asyncio.get_running_loop().create_future()
                await asyncio.shield(self._news)

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
        self._news = None


class RequestDeduplicator:
    def __init__(
        self,
        clock: Callable[[], float],
        *,
        kept_answers: int = KEPT_ANSWERS,
        kept_bytes: int = KEPT_BYTES,
        kept_of_a_caller: int = KEPT_OF_A_CALLER,
    ) -> None:
        self.dropped: Counter[str] = Counter()
        """Answers that are not kept any more, by cause: their age, the bound of their caller, or that of all callers. A
        call with the key of one of them is another call, with another step."""
        self._clock = clock
        self._max_answers = kept_answers
        self._max_bytes = kept_bytes
        self._max_of_a_caller = kept_of_a_caller
        self._in_flight: dict[Hashable, SharedResponse] = {}
        self._kept: OrderedDict[Hashable, SharedResponse] = OrderedDict()
        self._by_caller: defaultdict[str, OrderedDict[Hashable, None]] = defaultdict(OrderedDict)
        """The keys of the kept answers to each caller, the oldest first."""
        self._bytes: Counter[str] = Counter()
        """Bytes of the kept answers to each caller."""
        self._total = 0

    def find(self, key: Hashable) -> SharedResponse | None:
        """The response to the call that a call with this key repeats."""
        shared = self._in_flight.get(key)
        if shared is not None and shared.listeners:  # a call without listeners is about to be cancelled
            return shared
        shared = self._kept.get(key)
        return None if shared is None or shared.kept_until < self._clock() else shared

    def lead(self, key: Hashable, on_deserted: Callable[[], object], caller: str = "") -> SharedResponse:
        """Begin a call of this caller that others may join."""
        shared = self._in_flight[key] = SharedResponse(on_deserted, caller=caller)
        return shared

    def end(self, key: Hashable, shared: SharedResponse, *, keep: bool) -> None:
        """The call is over. `keep`: it has an Idempotency-Key and succeeded, so that its answer is given again."""
        shared.give_up()
        if self._in_flight.get(key) is shared:
            del self._in_flight[key]
        if keep and 0 < shared.status < 400:
            if key in self._kept:
                self._drop(key, "age")
            shared.kept_until = self._clock() + KEPT_SECONDS
            self._kept[key] = shared
            self._by_caller[shared.caller][key] = None
            self._bytes[shared.caller] += shared.size
            self._total += shared.size
            self._drop_oldest(shared.caller)

    def _drop_oldest(self, caller: str) -> None:
        """Drop what is too large of this caller, and what is too old, too many or too large of all."""
        while self._bytes[caller] > self._max_of_a_caller:
            self._drop(next(iter(self._by_caller[caller])), "caller")
        while self._kept:
            key, oldest = next(iter(self._kept.items()))
            if oldest.kept_until < self._clock():
                self._drop(key, "age")
            elif len(self._kept) > self._max_answers or self._total > self._max_bytes:
                self._drop(key, "room")
            else:
                return

    def _drop(self, key: Hashable, cause: str) -> None:
        shared = self._kept.pop(key)
        self.dropped[cause] += 1
        self._total -= shared.size
        self._bytes[shared.caller] -= shared.size
        del self._by_caller[shared.caller][key]
        if not self._by_caller[shared.caller]:
            del self._by_caller[shared.caller], self._bytes[shared.caller]


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
