"""Reading a request: its URL, its headers, its body, and the limits on them.

- A quota bounds what one agent may use at a time, so that it cannot push out the others. A caller is a trajectory, or
  the user of a session key in all sessions that the key opens; an opening counts as a call.
- A refused call says which quota is used up; the clients' SDKs try again later.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, MutableMapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple, Self

from starlette.exceptions import HTTPException

from stepwell.common.user_input import LARGEST_READ, MOST_CONTAINERS, brackets, check_containers, too_many_text
from stepwell.errors import BadRequest, Overloaded, TooLarge
from stepwell.pool.api.producing import Repeats, TrajectoryRef

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

LARGEST_BODY = 64 * 1024 * 1024
LONGEST_KEY = 255
"""Bytes of an Idempotency-Key. Clients send a UUID."""
SESSION_HEADERS = (b"x-session-id", b"x-claude-code-session-id", b"session-id", b"session_id")
"""Headers by which clients name a conversation: opencode, verifiers and others, Claude Code, Codex, older ones. The
first one counts."""
CAPTURE_HEADER = b"x-stepwell-capture"
MOST_BYTES = 2 * 2**30
"""Bytes of the bodies of all calls in flight, whoever makes them."""
ALL = "bytes_of_all"
IDLE_CALLERS = 10_000
"""Callers without a call in flight whose rates are remembered."""
BURST_SECONDS = 10.0


class CallUrl(NamedTuple):
    """The part of a call's URL below its base_url."""

    path: str = ""
    """The one of the dialect's path templates that it matches."""
    text: str = ""
    """The path and the query as the client sends them."""
    names: Mapping[str, str] = {}
    """The values in the places of the template's `{name}`."""
    query: Mapping[str, str] = {}

    @property
    def is_plain(self) -> bool:
        """Whether the URL says nothing that the template does not say."""
        return not (self.names or self.query)

    @property
    def sent(self) -> str:
        """`text` if it says more than the template, else empty."""
        return "" if self.is_plain else self.text


NO_URL = CallUrl()


def declared_length(headers: Headers) -> int | None:
    """The length in the header Content-Length; None for a body that comes in chunks."""
    for name, value in headers:
        if name == b"content-length":
            return int(value)
    return None


async def read_body(
    receive: Receive, largest: int = LARGEST_BODY, *, on_part: Callable[[int], None] | None = None
) -> bytes:
    """The whole body. TooLarge as soon as it is longer than `largest`, or long and of too many objects and lists.
    `on_part` is told the size of each part."""
    message = await receive()
    body: bytes = message.get("body", b"")
    if on_part is not None:
        on_part(len(body))
    if message.get("more_body"):
        parts = [body]
        size, containers = len(body), brackets(body)
        while message.get("more_body") and size <= largest:
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            containers += brackets(parts[-1])
            if size > LARGEST_READ and containers > MOST_CONTAINERS:
                raise TooLarge(too_many_text(MOST_CONTAINERS))
            if on_part is not None:
                on_part(len(parts[-1]))
        body = b"".join(parts)
    if len(body) > largest:
        raise TooLarge(too_large_text(largest))
    return body


def limited(receive: Receive, largest: int = LARGEST_BODY) -> Receive:
    """`receive`, which gives the whole body at once, or refuses one that is too large or has too many objects and
    lists. FastAPI would take any other exception for bad JSON."""
    is_read = False

    async def receive_limited() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        try:
            body = await read_body(receive, largest)
            check_containers(body)
        except TooLarge as failure:
            raise HTTPException(413, str(failure)) from None
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_limited


def too_large_text(largest: int) -> str:
    size = f"{largest >> 20} MiB" if largest >> 20 else f"{largest >> 10} KiB"
    return f"the request body is larger than {size}"


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
    if (captured := found.get(CAPTURE_HEADER)) not in (None, b"on", b"off"):
        raise BadRequest(f'the header {CAPTURE_HEADER.decode()} is "on" or "off"')
    kind, tries = found.get(b"x-stepwell-call"), found.get(b"x-stainless-retry-count")
    return CallHeaders(
        idempotency_key=found.get(b"idempotency-key") or None,
        is_first_try=tries == b"0",
        is_retry=tries not in (None, b"0"),
        kind=None if kind is None else kind.decode("latin-1"),
        traceparent=found.get(b"traceparent"),
        session=next(filter(None, map(found.get, SESSION_HEADERS)), None),
        is_captured=captured != b"off",
    )


@dataclass(frozen=True, slots=True)
class CallQuota:
    """The bounds of one caller. 0 means no bound."""

    in_flight: int = 512
    """Calls."""
    per_second: float = 0.0
    """Calls; as many may come at once as in ten seconds."""
    bytes: int = 128 * 2**20
    """Bytes of the bodies of its calls in flight."""
    tokens_per_second: float = 0.0
    """Sampled and read; a caller may be ahead by as many as in ten seconds."""

    @classmethod
    def read(cls, choices: tuple[str, ...]) -> "CallQuota":
        """Reads NAME=NUMBER."""
        given: dict[str, float] = {}
        for choice in choices:
            name, _, number = choice.partition("=")
            if name not in cls.__slots__:
                raise BadRequest(f"no quota is called {name!r}; there are {', '.join(cls.__slots__)}")
            try:
                given[name] = float(number) if name.endswith("per_second") else int(number)
            except ValueError:
                raise BadRequest(f"the quota {name} needs a number, not {number!r}") from None
        return cls(**given)  # type: ignore[arg-type]  # the loop gives each field its type


@dataclass(slots=True)
class CallerUsage:
    """The usage of one caller now."""

    in_flight: int = 0
    bytes: int = 0
    calls: float = 0.0
    """Calls counted against the rate limit that have not decayed yet."""
    tokens: float = 0.0
    at: float = 0.0


class QuotaUse:
    """The share of its caller's quota that one call takes, from its creation until it is left."""

    __slots__ = ("_declared", "_is_bounded", "_quotas", "_size", "_usage")

    def __init__(self, quotas: "CallQuotas", usage: CallerUsage, declared: int | None, *, is_bounded: bool) -> None:
        self._quotas, self._usage, self._is_bounded = quotas, usage, is_bounded
        self._declared, self._size = declared, 0
        self.grow(declared or 0)

    async def body(self, receive: Receive) -> bytes:
        """Reads the body; one without a declared size is counted as it arrives."""
        return await read_body(receive, on_part=self.grow if self._declared is None else None)

    def grow(self, size: int) -> None:
        self._quotas.take(self._usage, size, is_bounded=self._is_bounded)
        self._size += size

    def use(self, tokens: int) -> None:
        self._usage.tokens += tokens

    def __enter__(self) -> Self:
        self._usage.in_flight += 1
        self._usage.calls += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._usage.in_flight -= 1
        self._usage.bytes -= self._size
        self._quotas.bytes -= self._size


@dataclass(slots=True)
class CallQuotas:
    quota: CallQuota = field(default_factory=CallQuota)
    clock: Callable[[], float] = time.monotonic
    refused: Counter[str] = field(default_factory=Counter)
    """Refused calls, by the name of the quota."""
    bytes: int = 0
    """Bytes of the bodies of all calls in flight."""
    _callers: dict[str, CallerUsage] = field(default_factory=dict)

    def call_of(self, caller: str, size: int | None) -> QuotaUse:
        """A call with a body of this size, if its headers declare one. Overloaded if the caller has too much; an empty
        caller has no quota."""
        usage = self._usage(caller) if caller else CallerUsage()
        if caller:
            self._check("in_flight", usage.in_flight + 1, self.quota.in_flight)
            self._check("per_second", usage.calls + 1, self.quota.per_second * BURST_SECONDS)
            self._check("tokens_per_second", usage.tokens, self.quota.tokens_per_second * BURST_SECONDS)
        return QuotaUse(self, usage, size, is_bounded=bool(caller))

    def take(self, usage: CallerUsage, size: int, *, is_bounded: bool) -> None:
        """Count more bytes of a body."""
        if is_bounded:
            self._check("bytes", usage.bytes + size, self.quota.bytes)
        if self.bytes + size > MOST_BYTES:
            self.refused[ALL] += 1
            raise Overloaded(f"the bodies of all calls in flight have {MOST_BYTES >> 20} MiB; try again in a moment")
        usage.bytes += size
        self.bytes += size

    def _check(self, name: str, used: float, bound: float) -> None:
        if bound and used > bound:
            self.refused[name] += 1
            limit = getattr(self.quota, name)
            raise Overloaded(f"this agent's quota {name}={limit:g} is used up; try again in a moment, or see --quota")

    def _usage(self, caller: str) -> CallerUsage:
        now = self.clock()
        usage = self._callers.pop(caller, None) or CallerUsage(at=now)
        passed, usage.at = now - usage.at, now
        usage.calls = max(0.0, usage.calls - passed * self.quota.per_second)
        usage.tokens = max(0.0, usage.tokens - passed * self.quota.tokens_per_second)
        self._callers[caller] = usage  # the newest is last
        if len(self._callers) > IDLE_CALLERS:
            self._drop_one()
        return usage

    def _drop_one(self) -> None:
        """The oldest, unless it has a call in flight: then it is looked at again later."""
        caller, usage = next(iter(self._callers.items()))
        del self._callers[caller]
        if usage.in_flight:
            self._callers[caller] = usage
