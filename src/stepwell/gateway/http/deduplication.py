"""Calls that are made twice and meant once: a retry joins the call that is still under way, or gets its answer again.

Two calls are one if they carry the same Idempotency-Key, or the same body while the first is in flight. The second rule
is not for clients that say of a request that it is their first try (OpenAI's SDKs do, in x-stainless-retry-count): an
agent may well ask the same thing several times at once, and wants several answers.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass, field

KEPT_SECONDS = 600.0
KEPT_ANSWERS = 10_000
KEPT_BYTES = 64 * 1024 * 1024


@dataclass(slots=True, eq=False)
class SharedResponse:
    """A call under way, what it has answered so far, and how many wait for it."""

    on_deserted: Callable[[], object]
    """Called when no one waits for it any more."""
    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    listeners: int = 1
    ended: bool = False
    size: int = 0
    kept_until: float = 0.0
    _parts: list[tuple[bytes, bool]] = field(default_factory=list)
    _news: "asyncio.Future[None] | None" = None

    def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status, self.headers = status, headers

    def add(self, data: bytes, *, more: bool) -> None:
        self._parts.append((data, more))
        self.size += len(data)
        self.ended = self.ended or not more
        self._tell()

    def leave(self) -> None:
        """One of those who wait is gone."""
        self.listeners -= 1
        if self.listeners == 0 and not self.ended:
            self.on_deserted()

    def give_up(self) -> None:
        """Nothing more will come."""
        self.ended = True
        self._tell()

    async def parts(self) -> AsyncIterator[tuple[bytes, bool]]:
        """All of the answer, from its beginning."""
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

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
        self._news = None


class RequestDeduplicator:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_flight: dict[Hashable, SharedResponse] = {}
        self._kept: OrderedDict[Hashable, SharedResponse] = OrderedDict()
        self._kept_bytes = 0

    def find(self, key: Hashable) -> SharedResponse | None:
        """The call that one with this key is a repetition of."""
        shared = self._in_flight.get(key)
        if shared is not None and shared.listeners:  # one that all have left is about to be cancelled
            return shared
        shared = self._kept.get(key)
        return None if shared is None or shared.kept_until < self._clock() else shared

    def lead(self, key: Hashable, on_deserted: Callable[[], object]) -> SharedResponse:
        shared = self._in_flight[key] = SharedResponse(on_deserted)
        return shared

    def end(self, key: Hashable, shared: SharedResponse, *, keep: bool) -> None:
        """The call is over. `keep`: it had an Idempotency-Key, and its answer, which was no failure, is given again."""
        shared.give_up()
        if self._in_flight.get(key) is shared:
            del self._in_flight[key]
        if keep and 0 < shared.status < 400:
            if (replaced := self._kept.pop(key, None)) is not None:
                self._kept_bytes -= replaced.size
            shared.kept_until = self._clock() + KEPT_SECONDS
            self._kept[key] = shared
            self._kept_bytes += shared.size
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """As many as are too old, or too many, or too large together."""
        now = self._clock()
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if oldest.kept_until >= now and len(self._kept) <= KEPT_ANSWERS and self._kept_bytes <= KEPT_BYTES:
                return
            self._kept.popitem(last=False)
            self._kept_bytes -= oldest.size


@dataclass(frozen=True, slots=True)
class CallHeaders:
    """What a call's headers say of it."""

    idempotency_key: bytes | None
    is_first_try: bool
    kind: str | None
    """task or side, where the agent's owner says so."""
    traceparent: bytes | None

    @property
    def may_join(self) -> bool:
        """It may be a call that was made before."""
        return self.idempotency_key is not None or not self.is_first_try

    def key(self, trajectory_uid: str, body: bytes) -> Hashable:
        """Two calls with the same one are the same, if the later may join."""
        if self.idempotency_key is not None:
            return trajectory_uid, self.idempotency_key
        return trajectory_uid, len(body), hash(body)


def read_call_headers(headers: list[tuple[bytes, bytes]]) -> CallHeaders:
    key, first, kind, traceparent = None, False, None, None
    for name, value in headers:
        if name == b"idempotency-key":
            key = value or None
        elif name == b"x-stainless-retry-count":
            first = value == b"0"
        elif name == b"x-stepwell-call":
            kind = value.decode("latin-1")
        elif name == b"traceparent":
            traceparent = value
    return CallHeaders(key, first, kind, traceparent)
