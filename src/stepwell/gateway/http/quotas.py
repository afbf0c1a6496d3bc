"""Quotas on what one agent may use at a time, so that it cannot push out the others.

A caller is a trajectory, or the user of a session key in all sessions that the key opens; an opening counts as a call.
A refused call says which quota is used up; the clients' SDKs try again later.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from stepwell.errors import BadRequest, Overloaded
from stepwell.gateway.requests import Receive, read_body

MOST_BYTES = 2 * 2**30
"""Bytes of the bodies of all calls in flight, whoever makes them."""
ALL = "bytes_of_all"
IDLE_CALLERS = 10_000
"""Callers without a call in flight whose rates are remembered."""


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


BURST_SECONDS = 10.0


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
