"""The gateways that may hold steps of a shard's trajectories, what the shard asks of them, and what they report of
their engines.

- A shard learns that a gateway serves a trajectory when the gateway first asks for it: no message per call.
- Before a trajectory is completed, all its other gateways are asked to flush: to send what they hold of it.
- While there are calls or completions, each gateway shows about once a second that it lives, and takes what it is asked
  for. Otherwise it waits until the shard calls it. One that has not been seen for HEARTBEAT seconds is dead, and nobody
  waits for it. What it holds comes late, and is counted as late. Seconds in which no gateway is heard do not count:
  then the shard itself is cut off, or was stopped. After such a silence the others have as long as it was to come back,
  because TCP tries again at growing intervals.
- A gateway that cannot reach the shard for a while answers calls without asking it. So one whose word is older than
  GAP seconds may serve any trajectory, until it shows itself. If it has answered such calls, it says so.
- Who serves a trajectory is in the journal, the calls under way are not. After a restart, a death that was none, or
  answers that the pool did not know of, a gateway is asked to tell its calls, and completions wait until it has. After
  a restart it has two heartbeats to find the shard, perhaps on another node.
- What gateways last reported of their engines, and whether a trainer brings weights to them, is only in memory. A
  version that no engine reports is refused, because engines without a known version get no calls. Where nobody knows
  what the engines have, nothing is refused: without gateways, while an engine is paused or changes its weights, and
  with engines that never report a version. As long as a trainer is heard that syncs weights, versions are not refused,
  and gateways hold calls until engines have weights.
"""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress

from stepwell.pool.api.producing import TELL_CALLS, Requests
from stepwell.pool.state.records import Trajectory

HEARTBEAT = 15.0
"""Seconds."""
LONGEST_RETURN = 60.0
"""Seconds that a gateway has to come back after a long silence."""
GAP = 1.5
"""Seconds for which the word of a gateway holds that it answers no call that the shard does not know. An answer waits
for the shard for 2, and a gateway of which one has waited for 0.5 does not give its word."""
SHOW_PAUSE = 0.75
"""Seconds after which a gateway shows itself while there are calls or completions."""
BUSY = 60.0
"""Seconds after the last of them."""
IDLE_PAUSE = 300.0
"""Seconds after which it shows itself otherwise."""
TELL_PAUSE = 1.0
"""Seconds until a gateway that has not told its calls is asked for them again."""

ANNOUNCED_FOR = 90.0
"""Seconds. A trainer announces itself each second, but rests up to 60 after failures."""
MOST_REPORTS = 10_000
"""Gateways whose reports are kept. One reports when its engines have changed, so its report counts while it lives."""


class GatewayRoster:
    def __init__(
        self,
        known: Iterable[str],
        clock: Callable[[], float] = time.monotonic,
        call: Callable[[str], None] = lambda gateway: None,
    ) -> None:
        """`known` are the gateways from before a restart. `clock` gives seconds, and never goes back. `call` makes a
        gateway show itself soon."""
        self._clock = clock
        self._call = call
        now = clock()
        self._seen = dict.fromkeys(known, now + HEARTBEAT)
        self._untold = set(self._seen)
        """Gateways that must report which calls they have."""
        self._tell_asked_at: dict[str, float] = {}
        """By gateway: when it was last asked for its calls."""
        self._heard_at = now
        """When any gateway was last heard."""
        self._is_busy = bool(self._seen)
        self._busy_until = now + BUSY
        self._answered_at: dict[str, float] = {}
        """By gateway: when its requests were last taken."""
        self._word_at: dict[str, float] = {}
        """By gateway: when it last gave its word."""
        self._called: set[str] = set()
        """Gateways that were called to show themselves, and have not given their word since."""
        self._awaited: set[str] = set()
        """Called gateways for whose word a completion waits."""
        self._requests: dict[str, set[str]] = {}
        """By gateway: the trajectories that it is asked to flush."""
        self._flushed = asyncio.Event()
        """Replaced whenever a gateway has flushed, told or left, and when the last one that was called has come."""

    def living(self) -> tuple[str, ...]:
        oldest = self._clock() - HEARTBEAT if self._is_busy else -math.inf
        return tuple(sorted(gateway for gateway, seen in self._seen.items() if seen > oldest))

    def watch(self) -> None:
        """There are calls or completions: it matters who lives."""
        now = self._clock()
        if not self._is_busy:
            self._is_busy, self._heard_at = True, now
            self._seen = {gateway: max(now, seen) for gateway, seen in self._seen.items()}
            for gateway in self._seen:
                self._show(gateway)
        self._busy_until = now + BUSY

    def take_dead(self) -> dict[str, bool]:
        """Removes and returns the gateways that have died since the last time; True for one that had reported its
        calls. Empty while no gateway is heard: then the shard itself is cut off."""
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
        if self._is_busy and (silence := now - self._heard_at) > GAP:
            longer = silence + max(0.0, min(silence, LONGEST_RETURN) - HEARTBEAT)
            self._seen = {known: seen + longer for known, seen in self._seen.items()}
            self._busy_until = now + BUSY
        elif now > self._busy_until:
            self._is_busy = False
        self._heard_at = now
        self._seen[gateway] = now

    def take_predecessors(self, gateway: str) -> list[str]:
        """Removes and returns the gateways whose spool this one has: they have ended, because a spool belongs to one
        process."""
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
        self._answered_at.pop(gateway, None)
        self._word_at.pop(gateway, None)
        self._requests.pop(gateway, None)
        self._called.discard(gateway)
        self._awaited.discard(gateway)
        self.notify()

    def holders(self, trajectory: Trajectory, but: str) -> set[str]:
        """The living gateways that may hold steps of it, except one."""
        self.watch()
        living = set(self.living()) - {but}
        return {gateway for gateway in living if self._may_hold(trajectory, gateway) or not self._has_word(gateway)}

    def ask_for(self, trajectory: Trajectory, gateways: Iterable[str]) -> None:
        """What they hold of it. Of one whose word the shard lacks, it may turn out that it holds nothing."""
        for gateway in gateways:
            if self._may_hold(trajectory, gateway):
                self.ask(gateway, trajectory.uid)
            else:
                self._awaited.add(gateway)
                self._show(gateway)

    def ask(self, gateway: str, trajectory_uid: str) -> None:
        self._requests.setdefault(gateway, set()).add(trajectory_uid)
        self._show(gateway)

    def take_requests(self, gateway: str, since: float, *, has_told: bool) -> Requests:
        """What it has to flush. `since` are the seconds from the answer to its last question until it made this one."""
        now = self._clock()
        answered_at = self._answered_at.get(gateway, -math.inf)
        self._answered_at[gateway] = now
        if not has_told:
            self._untold.add(gateway)
        self._word_at[gateway] = min(now, answered_at + since)
        if gateway in self._untold and now - self._tell_asked_at.get(gateway, -math.inf) >= TELL_PAUSE:
            self._tell_asked_at[gateway] = now
            self._requests.setdefault(gateway, set()).add(TELL_CALLS)
        requested = sorted(self._requests.pop(gateway, ()))
        if not self._has_word(gateway):
            return Requests(requested, 0.0)
        self._called.discard(gateway)
        if gateway in self._awaited:
            self._awaited.discard(gateway)
            if not self._awaited:
                self.notify()
        return Requests(requested, SHOW_PAUSE if self._is_busy or gateway in self._untold else IDLE_PAUSE)

    def _may_hold(self, trajectory: Trajectory, gateway: str) -> bool:
        return gateway in trajectory.gateways or gateway in self._untold

    def _has_word(self, gateway: str) -> bool:
        return self._clock() - self._word_at.get(gateway, -math.inf) <= GAP

    def _show(self, gateway: str) -> None:
        if gateway not in self._called:
            self._called.add(gateway)
            self._call(gateway)

    def notify(self) -> None:
        """A gateway has flushed a trajectory, has told its calls, has left, or has come."""
        self._flushed.set()
        self._flushed = asyncio.Event()

    async def wait(self, timeout: float) -> None:
        """Until the next `notify`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._flushed.wait()


class EngineReports:
    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds, and never goes back."""
        self._clock = clock
        self._reports: dict[str, Mapping[str, int | None]] = {}
        """By gateway: the version of each engine that answers."""
        self._announced_at: float | None = None

    @property
    def is_sync_expected(self) -> bool:
        """A trainer that syncs weights was heard lately."""
        return self._announced_at is not None and self._clock() - self._announced_at < ANNOUNCED_FOR

    def announce_sync(self) -> None:
        self._announced_at = self._clock()

    def note(self, gateway: str, versions: Mapping[str, int | None]) -> None:
        """`versions` by the engines' addresses: 0 are the weights that an engine was started with, None is unknown."""
        self._reports.pop(gateway, None)
        self._reports[gateway] = versions
        if len(self._reports) > MOST_REPORTS:
            del self._reports[next(iter(self._reports))]

    def why_unreported(self, version: int, living: Collection[str]) -> str | None:
        """Why the policy cannot have this version, with what to do; None if it can. `living` are the gateways."""
        told = [versions for gateway, versions in self._reports.items() if gateway in living]
        reported = {engine: found for versions in told for engine, found in versions.items()}
        known = set(reported.values())
        if not known or None in known or version in known or self.is_sync_expected:
            return None
        shown = "; ".join(f"{engine} has {_named(found)}" for engine, found in sorted(reported.items()))
        return (
            f"no engine reports version {version}: {shown}. Engines without a known version would get no calls. "
            "WeightSync brings weights to the engines and then sets their version; if something else does, give the "
            f'engine its version first, by POST /update_weight_version {{"new_version": "{version}"}}. '
            f"set_policy_version({version}, check=False) sets it all the same"
        )


def _named(version: int | None) -> str:
    return f"version {version}" if version else "the weights that it was started with"
