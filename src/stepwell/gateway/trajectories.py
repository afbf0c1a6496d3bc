"""Trajectories as this gateway knows them.

The URL names the trajectory and its state is in the pool, so any gateway serves any call. If what is kept here is lost,
the pool is asked again.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from stepwell.common.async_calls import ignore_failure
from stepwell.errors import PoolUnavailable, UnknownTrajectory
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.pool.api.sessions import session_id_of
from stepwell.pool.client import PoolClient

MAX_KNOWN = 100_000
UNCHECKED = ""
"""The channel of a call whose trajectory the pool could not be asked for. Such a call is sampled as the agent asks."""
ASK_TIMEOUT = 2.0
"""Seconds that a call waits for the pool to confirm its trajectory."""
ASK_PAUSE = 10.0
"""Seconds until the pool is asked again for a trajectory, after it did not answer."""


class CallsInFlight:
    """Of one trajectory; entered by each call. Removes itself when the last one ends."""

    __slots__ = ("_all", "_count", "ended", "ref")

    def __init__(self, ref: TrajectoryRef, every: dict[str, "CallsInFlight"]) -> None:
        self.ended = asyncio.Event()
        self.ref = ref
        self._all = every
        self._count = 0

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if self._count == 0:
            del self._all[self.ref.trajectory_uid]
            self.ended.set()


class KnownTrajectories:
    """The trajectories that the pool has, as far as this gateway has asked."""

    def __init__(
        self,
        pool: PoolClient,
        *,
        answers_unchecked: bool = True,
        ask_timeout: float = ASK_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`answers_unchecked`: while the pool cannot be asked for a trajectory, its calls are answered all the same."""
        self.unchecked = 0
        """Calls that were answered although the pool could not be asked."""
        self.on_drop: Callable[[str], None] = lambda _: None
        """Called with each trajectory that is dropped here."""
        self._pool = pool
        self._answers_unchecked = answers_unchecked
        self._ask_timeout = ask_timeout
        self._clock = clock
        self._ask_again_at: OrderedDict[str, float] = OrderedDict()
        """By trajectory for which the pool did not answer, so that not every call of it waits."""
        self._known: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """The prompt_uid and the channel of each."""
        self._calls: dict[str, CallsInFlight] = {}
        self._asking: set[asyncio.Task[str | None]] = set()
        """Questions to the pool. They go on when nobody waits for them, so that the shard learns who serves what."""

    def add(self, ref: TrajectoryRef, channel: str) -> None:
        self._known[ref.trajectory_uid] = ref.prompt_uid, channel
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def drop(self, trajectory_uid: str) -> None:
        self._known.pop(trajectory_uid, None)
        self.on_drop(trajectory_uid)

    def drop_all(self) -> None:
        """The pool is asked again for each: some of them may have been removed from it."""
        for trajectory_uid in list(self._known):
            self.drop(trajectory_uid)

    def call_of(self, ref: TrajectoryRef) -> CallsInFlight:
        """To be entered while a call of the trajectory is in flight."""
        calls = self._calls.get(ref.trajectory_uid)
        if calls is None:
            calls = self._calls[ref.trajectory_uid] = CallsInFlight(ref, self._calls)
        return calls

    def sessions_in_flight(self, trajectory_uid: str | None = None) -> list[TrajectoryRef]:
        """The trajectories of sessions that have a call in flight; only this one, if it is given."""
        calls = self._calls.values() if trajectory_uid is None else filter(None, [self._calls.get(trajectory_uid)])
        return [call.ref for call in calls if session_id_of(call.ref.prompt_uid)]

    async def calls_end(self, trajectory_uid: str, timeout: float) -> None:
        """Wait until no call of the trajectory is in flight, or for so many seconds."""
        if trajectory_uid in self._calls:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._calls[trajectory_uid].ended.wait()

    def cached_channel(self, ref: TrajectoryRef) -> str | None:
        """None if the pool must be asked."""
        prompt_uid, channel = self._known.get(ref.trajectory_uid, (None, None))
        return channel if prompt_uid == ref.prompt_uid else None

    async def channel_of(self, ref: TrajectoryRef) -> str:
        """UnknownTrajectory if the pool would refuse the call's step, before the call costs the engine anything.

        UNCHECKED if the pool cannot be asked and the call is to be answered all the same.
        """
        channel = self.cached_channel(ref)
        if channel is not None:
            return channel
        try:
            channel = await self._ask(ref)
        except PoolUnavailable:
            if not self._answers_unchecked:
                raise
            self.unchecked += 1
            return UNCHECKED
        if channel is None:
            raise UnknownTrajectory(
                f"no open trajectory {ref.trajectory_uid} of prompt_uid {ref.prompt_uid}; take a base_url from "
                "POST /init_trajectory"
            )
        self.add(ref, channel)
        return channel

    async def _ask(self, ref: TrajectoryRef) -> str | None:
        if not self._answers_unchecked:
            return await self._pool.knows(ref.trajectory_uid, ref.prompt_uid)
        uid, now = ref.trajectory_uid, self._clock()
        if now < self._ask_again_at.get(uid, 0.0):
            raise PoolUnavailable("the pool did not answer a moment ago")
        asking = asyncio.create_task(self._pool.knows(uid, ref.prompt_uid))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        asking.add_done_callback(ignore_failure)
        try:
            async with asyncio.timeout(self._ask_timeout):
                channel = await asyncio.shield(asking)
        except (PoolUnavailable, TimeoutError) as failure:
            self._ask_again_at[uid] = self._clock() + ASK_PAUSE
            if len(self._ask_again_at) > MAX_KNOWN:
                self._ask_again_at.popitem(last=False)
            raise PoolUnavailable(str(failure)) from None
        self._ask_again_at.pop(uid, None)
        return channel
