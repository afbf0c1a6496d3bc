"""Calls that are sent twice and meant once: a retry joins the call that is in flight, or gets its stored answer.

Two calls are the same if they have the same Idempotency-Key, or the same body while the first is in flight. The second
rule does not apply to a request that says it is a first try (OpenAI's SDKs do, in x-stainless-retry-count): an agent
may send the same request several times at once and want several answers.
"""

import asyncio
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass, field
from hashlib import blake2b

from stepwell.errors import BadRequest
from stepwell.gateway.requests import Headers
from stepwell.gateway.response_writer import Sighting
from stepwell.pool.api.producing import Repeats, TrajectoryRef

SESSION_HEADERS = (b"x-session-id", b"x-claude-code-session-id", b"session-id", b"session_id")
"""Headers by which clients name a conversation: opencode, verifiers and others, Claude Code, Codex, older ones. The
first one counts."""
CAPTURE_HEADER = b"x-stepwell-capture"
KEPT_SECONDS = 600.0
KEPT_ANSWERS = 10_000
KEPT_BYTES = 64 * 1024 * 1024
"""Bytes of all kept answers."""
KEPT_OF_A_CALLER = KEPT_BYTES // 8
"""Bytes of the kept answers to one caller, so that nobody pushes out those of all others."""
AN_ANSWER, A_PART = 2_000, 150
"""Bytes that a kept answer, and each of its parts, take beside the body."""
LONGEST_KEY = 255
"""Bytes of an Idempotency-Key. Clients send a UUID."""


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


@dataclass(frozen=True, slots=True)
class CallHeaders:
    """The headers of a call that the gateway reads."""

    idempotency_key: bytes | None
    is_first_try: bool
    kind: str | None
    """x-stepwell-call: task or side."""
    traceparent: bytes | None
    session: bytes | None = None
    """The client's name of its conversation."""
    is_captured: bool = True
    """False: the call is not to be recorded."""
    is_retry: bool = False
    """Whether the client says that it asks again, because it got no answer."""

    @property
    def may_join(self) -> bool:
        """Whether the call may be a repetition of another one."""
        return self.idempotency_key is not None or not self.is_first_try

    @property
    def repeats(self) -> Repeats:
        """The repetitions that are found at other gateways too."""
        return Repeats.ALL if self.idempotency_key is not None or self.is_retry else Repeats.LOST

    def shared_key(self, body: bytes, url: str = "") -> str:
        """The same key in all gateways. `url` is what the call's URL says beside the path of its dialect."""
        digest = blake2b(self.idempotency_key or body, digest_size=16)
        if url and self.idempotency_key is None:
            digest.update(b"\0" + url.encode(errors="surrogatepass"))
        return digest.hexdigest()

    def key(self, ref: TrajectoryRef, body: bytes, url: str = "") -> Hashable:
        """Two calls with the same key are the same, if the later one may join. `url` is what stands in the URL below
        the base_url."""
        if self.idempotency_key is not None:
            return ref, self.idempotency_key
        return ref, url, len(body), hash(body)


def read_call_headers(headers: Headers) -> CallHeaders:
    found = dict(headers)
    if len(found.get(b"idempotency-key", b"")) > LONGEST_KEY:
        raise BadRequest(f"an Idempotency-Key has at most {LONGEST_KEY} bytes; a UUID is enough")
    kind, tries = found.get(b"x-stepwell-call"), found.get(b"x-stainless-retry-count")
    return CallHeaders(
        idempotency_key=found.get(b"idempotency-key") or None,
        is_first_try=tries == b"0",
        is_retry=tries not in (None, b"0"),
        kind=None if kind is None else kind.decode("latin-1"),
        traceparent=found.get(b"traceparent"),
        session=next(filter(None, map(found.get, SESSION_HEADERS)), None),
        is_captured=_is_captured(found.get(CAPTURE_HEADER)),
    )


def _is_captured(value: bytes | None) -> bool:
    if value not in (None, b"on", b"off"):
        raise BadRequest(f'the header {CAPTURE_HEADER.decode()} is "on" or "off"')
    return value != b"off"
