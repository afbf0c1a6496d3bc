"""The gateways that may hold steps of a shard's trajectories, and what the shard asks of them.

- A shard learns that a gateway serves a trajectory when the gateway first asks for it: no message per call.
- Before a trajectory is completed, all its other gateways are asked to flush: to send what they hold of it.
- A gateway waits for such requests at all times, which shows that it lives. One that has not been seen for HEARTBEAT
  seconds is dead, and nobody waits for it. What it holds comes late, and is counted as late. Seconds in which no
  gateway is heard do not count: then the shard itself is cut off, or was stopped. After such a silence the others have
  as long as it was to come back, because TCP tries again at growing intervals.
- A gateway that cannot reach the shard for a while answers calls without asking it. So one that was silent for GAP
  seconds may serve any trajectory.
- Who serves a trajectory is in the journal, the calls under way are not. After a restart, a gap or a death that was
  none, a gateway is asked to tell its calls, and completions wait until it has. After a restart it has two heartbeats
  to find the shard, perhaps on another node.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from stepwell.pool.api.calls import TELL_CALLS
from stepwell.pool.state.records import Trajectory

HEARTBEAT = 15.0
"""Seconds."""
LONGEST_RETURN = 60.0
"""Seconds that a gateway has to come back after a long silence."""
GAP = 1.5
"""Seconds. Longer than a gateway waits for requests (1), and shorter than a call waits for the shard (2)."""
TELL_PAUSE = 1.0
"""Seconds until a gateway that has not told its calls is asked for them again."""


class GatewayRoster:
    def __init__(self, known: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        """`known` are the gateways from before a restart. `clock` gives seconds, and never goes back."""
        self._clock = clock
        self._seen = dict.fromkeys(known, clock() + HEARTBEAT)
        self._untold = set(self._seen)
        """Those that must tell which calls they have."""
        self._tell_asked_at: dict[str, float] = {}
        """By gateway: when it was last asked for its calls."""
        self._heard_at = clock()
        """When any gateway was last heard."""
        self._waited_at: dict[str, float] = {}
        """By gateway: when it last came to wait for requests."""
        self._requests: dict[str, set[str]] = {}
        """By gateway: the trajectories that it is asked to flush."""
        self._asked: dict[str, asyncio.Event] = {}
        self._flushed = asyncio.Event()
        """Replaced whenever a gateway has flushed, told or left."""

    def living(self) -> tuple[str, ...]:
        oldest = self._clock() - HEARTBEAT
        return tuple(sorted(gateway for gateway, seen in self._seen.items() if seen > oldest))

    def take_dead(self) -> dict[str, bool]:
        """Those that have died since the last time; True for one that had told its calls. None while no gateway is
        heard: then the shard itself is cut off."""
        if self._clock() - self._heard_at > GAP:
            return {}
        dead = {gateway: gateway not in self._untold for gateway in self._seen.keys() - set(self.living())}
        for gateway in dead:
            self.leave(gateway)
            self._untold.add(gateway)
        return dead

    def note(self, gateway: str) -> None:
        """It lives."""
        now = self._clock()
        if (silence := now - self._heard_at) > GAP:
            longer = silence + max(0.0, min(silence, LONGEST_RETURN) - HEARTBEAT)
            self._seen = {known: seen + longer for known, seen in self._seen.items()}
        self._heard_at = now
        self._seen[gateway] = now

    def take_predecessors(self, gateway: str) -> list[str]:
        """Those whose spool this gateway has: they have ended, because a spool belongs to one process."""
        spool, dot, _ = gateway.rpartition(".")
        if not dot or gateway in self._seen:
            return []
        ended = [other for other in self._seen if other.rpartition(".")[0] == spool]
        for other in ended:
            self.leave(other)
        return ended

    def note_told(self, gateway: str) -> None:
        self._untold.discard(gateway)
        self._tell_asked_at.pop(gateway, None)
        self.notify()

    def leave(self, gateway: str) -> None:
        self._seen.pop(gateway, None)
        self._untold.discard(gateway)
        self._tell_asked_at.pop(gateway, None)
        self._waited_at.pop(gateway, None)
        self._requests.pop(gateway, None)
        self.notify()

    def holders(self, trajectory: Trajectory, but: str) -> set[str]:
        """The living gateways that may hold steps of it, except one."""
        living = set(self.living())
        if trajectory.gateways is None:
            return living - {but}
        now = self._clock()
        silent = {gateway for gateway in living if now - self._waited_at.get(gateway, now) > GAP}
        return (living & ({*trajectory.gateways} | silent | self._untold)) - {but}

    def ask(self, gateway: str, trajectory_uid: str) -> None:
        self._requests.setdefault(gateway, set()).add(trajectory_uid)
        self._asked.setdefault(gateway, asyncio.Event()).set()

    async def requests(self, gateway: str, timeout: float) -> list[str]:
        """The trajectories that this gateway has to flush, as soon as there are some; none after `timeout`."""
        self.note(gateway)
        now = self._clock()
        if now - self._waited_at.get(gateway, now) > GAP:
            self._untold.add(gateway)
        if gateway in self._untold and now - self._tell_asked_at.get(gateway, -math.inf) >= TELL_PAUSE:
            self._tell_asked_at[gateway] = now
            self.ask(gateway, TELL_CALLS)
        self._waited_at[gateway] = now
        asked = self._asked.setdefault(gateway, asyncio.Event())
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await asked.wait()
        asked.clear()
        self.note(gateway)
        return sorted(self._requests.pop(gateway, ()))

    def notify(self) -> None:
        """A gateway has flushed a trajectory, has told its calls, or has left."""
        self._flushed.set()
        self._flushed = asyncio.Event()

    async def wait(self, timeout: float) -> None:
        """Until the next `notify`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._flushed.wait()
