"""Which sessions get the canary, and which engines serve them.

- A session stays on its side as long as the canary lives, in every gateway: a hash of its id and the canary's version
  decides. Another version gets other sessions.
- A larger share keeps the sessions of a smaller one.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from stepwell.engines.replica import EngineReplica, EngineState
from stepwell.pool.api.policy import Canary

WHOLE = 2**64


@dataclass(frozen=True, slots=True)
class SideOfSession:
    """The engines that may serve a session."""

    name: str
    """`canary` or `stable`."""
    engines: Sequence[EngineReplica]

    def healthy(self, tried: Collection[EngineReplica] = ()) -> list[EngineReplica]:
        return [engine for engine in self.engines if engine.state is EngineState.HEALTHY and engine not in tried]

    def is_paused(self, tried: Collection[EngineReplica] = ()) -> bool:
        """A pause is short: its sessions wait. For an engine that waits for weights they do not."""
        return any(engine.state is EngineState.PAUSED and engine not in tried for engine in self.engines)


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
