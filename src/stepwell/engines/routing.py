"""Which engine gets the next call. Knows the engines and their states; sends nothing.

- The routing chooses among the healthy engines.
- While none is healthy and some are paused or unsynced, calls wait, so agents do not notice a weight update.
- Once it is known that nobody brings weights to the unsynced ones, calls that would wait for them fail.
- A call that samples no tokens may go to an unsynced engine.
- Engines that are down are tried only if all are down.
- No call gets the same engine twice.
- While there is a canary, a session's calls go to the engines of its side. If none of them answers, those of the other
  side do.
- A session stays on its side as long as the canary lives, in every gateway: a hash of its id and the canary's version
  decides. Another version gets other sessions, and a larger share keeps the sessions of a smaller one.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from stepwell.engines.replica import EngineReplica, EngineState
from stepwell.errors import BadRequest, EngineUnavailable
from stepwell.pool.api.policy import Canary, Serving

WAITED_FOR = (EngineState.PAUSED, EngineState.UNSYNCED)
RESUME_TOGETHER = 0.2
"""Seconds a waiting call leaves to the other engines to resume too; else all waiting calls go to the first one."""
WHOLE = 2**64


class RoundRobin:
    """Each engine in turn. Other routings take turns among those that they prefer."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, engines: Sequence[EngineReplica], sticky: str) -> EngineReplica:
        """One of `engines`, which is not empty, for a call of the trajectory `sticky`."""
        self._turn = (self._turn + 1) % len(engines)
        return engines[self._turn]


class LeastBusy(RoundRobin):
    """The engine with the fewest calls in flight; among equals, each in turn."""

    def choose(self, engines: Sequence[EngineReplica], sticky: str) -> EngineReplica:
        fewest = min(engine.in_flight for engine in engines)
        return super().choose([engine for engine in engines if engine.in_flight == fewest], sticky)


class Sticky(RoundRobin):
    """The same engine for all calls of a trajectory, so that they hit its prefix cache; calls of none take turns.

    Rendezvous hashing: when an engine is lost, only its own trajectories move; when it returns, they move back. The
    choice is the same in every process.
    """

    def choose(self, engines: Sequence[EngineReplica], sticky: str) -> EngineReplica:
        if not sticky:
            return super().choose(engines, sticky)
        return max(engines, key=lambda engine: blake2b(f"{sticky} {engine.address}".encode(), digest_size=8).digest())


ROUTINGS: Mapping[str, type[RoundRobin]] = {"round_robin": RoundRobin, "least_busy": LeastBusy, "sticky": Sticky}


def routing_named(name: str) -> RoundRobin:
    if name not in ROUTINGS:
        raise BadRequest(f"no routing is called {name!r}; there are: {', '.join(ROUTINGS)}")
    return ROUTINGS[name]()


@dataclass(frozen=True, slots=True)
class SideOfSession:
    """The engines that may serve a session."""

    name: str
    """`canary` or `stable`."""
    engines: Sequence[EngineReplica]


class SessionSplit:
    def __init__(self, canary: Canary, engines: Sequence[EngineReplica]) -> None:
        self.canary = canary
        self._limit = canary.share * WHOLE
        self._canary = SideOfSession("canary", [e for e in engines if e.address in canary.engines])
        self._stable = SideOfSession("stable", [e for e in engines if e.address not in canary.engines])

    def side_of(self, session: str) -> SideOfSession:
        """A call of no session is none of the canary's, unless all are."""
        if not session:
            return self._canary if self.canary.share == 1.0 else self._stable
        return self._canary if self.is_canary(session) else self._stable

    def is_canary(self, session: str) -> bool:
        digest = blake2b(f"{session} {self.canary.version}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) < self._limit


class SplitCounts:
    """How calls were split. It outlives a canary."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        """The number of calls by side."""
        self.served_by_other: Counter[str] = Counter()
        """Calls, by the side on which no engine answered."""


class EngineSelector:
    def __init__(self, routing: RoundRobin, hold_timeout: float) -> None:
        """`hold_timeout`: seconds a call waits for paused engines."""
        self.engines: list[EngineReplica] = []
        self._routing = routing
        self._hold_timeout = hold_timeout
        self._healthy: list[EngineReplica] = []
        self._changed = asyncio.Event()
        self._why_stuck = ""
        self._canary: Canary | None = None
        self._split: SessionSplit | None = None
        self.split_counts = SplitCounts()

    def set_serving(self, serving: Serving) -> None:
        if serving.canary != self._canary:
            self._canary = serving.canary
            self.note_change()

    def set_stuck(self, why: str) -> None:
        """Why calls cannot wait for an unsynced engine; empty if they can."""
        if why != self._why_stuck:
            self._why_stuck = why
            self.note_change()

    def add(self, engine: EngineReplica) -> None:
        self.engines.append(engine)
        self.note_change()

    def remove(self, engine: EngineReplica) -> None:
        """One that has left already is all right."""
        if engine in self.engines:
            self.engines.remove(engine)
            self.note_change()

    def note_change(self) -> None:
        """The state of an engine has changed."""
        self._healthy = [engine for engine in self.engines if engine.state is EngineState.HEALTHY]
        self._split = None if self._canary is None else SessionSplit(self._canary, self.engines)
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Returns when an engine was added, removed, or has changed its state."""
        await self._changed.wait()

    async def next(
        self, sticky: str, tried: Collection[EngineReplica], *, samples: bool = True
    ) -> EngineReplica | None:
        """An engine that was not tried yet; None if there is none left. `samples`: the call's tokens are sampled."""
        if self._split is not None and samples and (engine := await self._of_side(sticky, tried)) is not None:
            return engine
        if self._healthy and not tried:
            return self._routing.choose(self._healthy, sticky)
        if not samples and (left := self._left(tried, EngineState.HEALTHY, EngineState.UNSYNCED)):
            return self._routing.choose(left, sticky)
        while self._must_wait(tried):
            await self._wait_for_resume(tried)
        left = self._left(tried, EngineState.HEALTHY) or self._left(tried, EngineState.DOWN)
        return self._routing.choose(left, sticky) if left else None

    async def _of_side(self, sticky: str, tried: Collection[EngineReplica]) -> EngineReplica | None:
        """An engine of the session's side; None if the canary has ended, or no engine of that side answers."""
        while (split := self._split) is not None:
            side = split.side_of(sticky)
            if healthy := _untried(side.engines, tried, EngineState.HEALTHY):
                self.split_counts.calls[side.name] += not tried
                return self._routing.choose(healthy, sticky)
            # a pause is short: the side's sessions wait; for an engine that waits for weights they do not
            if not _untried(side.engines, tried, EngineState.PAUSED):
                self.split_counts.served_by_other[side.name] += bool(self._left(tried, EngineState.HEALTHY))
                return None
            await self._wait_for_change(self._left(tried, EngineState.PAUSED))
        return None

    async def _wait_for_change(self, paused: Sequence[EngineReplica]) -> None:
        try:
            async with asyncio.timeout(self._hold_timeout):
                await self.changed()
        except TimeoutError:
            raise EngineUnavailable(self._still_paused(paused)) from None

    def _left(self, tried: Collection[EngineReplica], *states: EngineState) -> list[EngineReplica]:
        return _untried(self.engines, tried, *states)

    def _must_wait(self, tried: Collection[EngineReplica]) -> bool:
        return not self._left(tried, EngineState.HEALTHY) and bool(self._left(tried, *WAITED_FOR))

    async def _wait_for_resume(self, tried: Collection[EngineReplica]) -> None:
        try:
            async with asyncio.timeout(self._hold_timeout):
                while self._must_wait(tried):
                    if self._why_stuck:
                        raise EngineUnavailable(self._why_stuck)
                    await self.changed()
        except TimeoutError:
            raise EngineUnavailable(self._still_paused(self._left(tried, *WAITED_FOR))) from None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RESUME_TOGETHER):
                while self._left(tried, EngineState.PAUSED):
                    await self.changed()

    def _still_paused(self, engines: Sequence[EngineReplica]) -> str:
        names = ", ".join(f"{engine.address}{engine.why and f' ({engine.why})'}" for engine in engines)
        return f"waited {self._hold_timeout:g} s for a paused engine to resume: {names}"


def _untried(
    engines: Sequence[EngineReplica], tried: Collection[EngineReplica], *states: EngineState
) -> list[EngineReplica]:
    return [engine for engine in engines if engine.state in states and engine not in tried]
