"""The gateways that may hold steps of a shard's trajectories, and what the shard asks of them.

- A shard learns that a gateway serves a trajectory when the gateway first asks for it: no message per call.
- Before a trajectory is completed, all its other gateways are asked to flush: to send what they hold of it.
- A gateway waits for such requests at all times, which shows that it lives. One that has not been seen for HEARTBEAT
  seconds is dead, and nobody waits for it. What it holds comes late, and is counted as late.
- After a restart a shard no longer knows who serves a trajectory. It asks all gateways that it knew; they count as seen
  at its start.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from stepwell.pool.state.records import Trajectory

HEARTBEAT = 15.0
"""Seconds. Three times as long as a gateway waits for requests."""


class GatewayRoster:
    def __init__(self, known: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        """`known` are the gateways from before a restart. `clock` gives seconds, and never goes back."""
        self._clock = clock
        self._seen = dict.fromkeys(known, clock())
        self._requests: dict[str, set[str]] = {}
        """By gateway: the trajectories that it is asked to flush."""
        self._asked: dict[str, asyncio.Event] = {}
        self._flushed = asyncio.Event()
        """Replaced whenever a gateway has flushed or left."""

    def living(self) -> tuple[str, ...]:
        """Those that are dead are forgotten."""
        oldest = self._clock() - HEARTBEAT
        self._seen = {gateway: seen for gateway, seen in self._seen.items() if seen > oldest}
        return tuple(sorted(self._seen))

    def note(self, gateway: str) -> None:
        """It lives."""
        self._seen[gateway] = self._clock()

    def leave(self, gateway: str) -> None:
        self._seen.pop(gateway, None)
        self._requests.pop(gateway, None)
        self.notify()

    def holders(self, trajectory: Trajectory, but: str) -> set[str]:
        """The living gateways that may hold steps of it, except one."""
        living = self.living()
        served_by = living if trajectory.gateways is None else trajectory.gateways
        return {gateway for gateway in served_by if gateway != but and gateway in living}

    def ask(self, gateway: str, trajectory_uid: str) -> None:
        self._requests.setdefault(gateway, set()).add(trajectory_uid)
        self._asked.setdefault(gateway, asyncio.Event()).set()

    async def requests(self, gateway: str, timeout: float) -> list[str]:
        """The trajectories that this gateway has to flush, as soon as there are some; none after `timeout`."""
        self.note(gateway)
        asked = self._asked.setdefault(gateway, asyncio.Event())
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await asked.wait()
        asked.clear()
        self.note(gateway)
        return sorted(self._requests.pop(gateway, ()))

    def notify(self) -> None:
        """A gateway has flushed a trajectory, or has left."""
        self._flushed.set()
        self._flushed = asyncio.Event()

    async def wait(self, timeout: float) -> None:
        """Until the next `notify`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._flushed.wait()
