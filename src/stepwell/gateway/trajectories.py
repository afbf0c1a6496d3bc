"""Trajectories as this gateway knows them, and how a black-box rollout begins and ends.

The URL names the trajectory and its state is in the pool, so any gateway serves any call. If what is kept here is lost,
the pool is asked again.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

from stepwell.common.access_keys import AccessKeys
from stepwell.common.async_calls import ignore_failure
from stepwell.errors import PoolUnavailable, UnknownTrajectory
from stepwell.gateway.recording.outbox import Outbox
from stepwell.pool.api.ports import StepSink
from stepwell.pool.api.producing import TRAIN, Registration, TrajectoryRef
from stepwell.wire import gateway_api

MAX_KNOWN = 100_000
UNCHECKED = ""
"""The channel of a call whose trajectory the pool could not be asked for. Such a call is sampled as the agent asks."""
ASK_TIMEOUT = 2.0
"""Seconds that a call waits for the pool to confirm its trajectory."""
ASK_PAUSE = 10.0
"""Seconds until the pool is asked again for a trajectory, after it did not answer."""
LEAVING_SECONDS = 1.0
"""How long a completion waits for calls in flight: an agent whose time is over leaves its call at the same moment."""


class CallsInFlight:
    """Of one trajectory; entered by each call. Forgets itself when the last one ends."""

    __slots__ = ("_all", "_count", "_trajectory_uid", "ended")

    def __init__(self, trajectory_uid: str, every: dict[str, "CallsInFlight"]) -> None:
        self.ended = asyncio.Event()
        self._trajectory_uid = trajectory_uid
        self._all = every
        self._count = 0

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if self._count == 0:
            del self._all[self._trajectory_uid]
            self.ended.set()


class KnownTrajectories:
    """The trajectories that the pool has, as far as this gateway has asked."""

    def __init__(
        self,
        pool: StepSink,
        *,
        answers_unchecked: bool = True,
        ask_timeout: float = ASK_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`answers_unchecked`: while the pool cannot be asked for a trajectory, its calls are answered all the same."""
        self.unchecked = 0
        """Calls that were answered although the pool could not be asked."""
        self.on_forget: Callable[[str], None] = lambda _: None
        """Called with each trajectory that is forgotten."""
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

    def forget(self, trajectory_uid: str) -> None:
        self._known.pop(trajectory_uid, None)
        self.on_forget(trajectory_uid)

    def call_of(self, trajectory_uid: str) -> CallsInFlight:
        """To be entered while a call of the trajectory is in flight."""
        calls = self._calls.get(trajectory_uid)
        if calls is None:
            calls = self._calls[trajectory_uid] = CallsInFlight(trajectory_uid, self._calls)
        return calls

    async def calls_end(self, trajectory_uid: str, timeout: float) -> None:
        """Wait until no call of the trajectory is in flight, or for so many seconds."""
        if trajectory_uid in self._calls:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._calls[trajectory_uid].ended.wait()

    async def channel_of(self, ref: TrajectoryRef) -> str:
        """UnknownTrajectory if the pool would refuse the call's step, before the call costs the engine anything.

        UNCHECKED if the pool cannot be asked and the call is to be answered all the same.
        """
        prompt_uid, channel = self._known.get(ref.trajectory_uid, (None, None))
        if channel is not None and prompt_uid == ref.prompt_uid:
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


@dataclass(frozen=True, slots=True)
class TrajectoryLifecycle:
    pool: StepSink
    outbox: Outbox
    known: KnownTrajectories
    keys: AccessKeys

    async def open(self, wanted: gateway_api.InitTrajectory, root: str) -> gateway_api.TrajectoryOpened:
        """`root` is the gateway's own address as the caller knows it, with a slash at its end."""
        ref = TrajectoryRef(wanted.trajectory_uid or uuid4().hex, wanted.prompt_uid or uuid4().hex)
        await self.pool.register_trajectory(
            Registration(ref.trajectory_uid, ref.prompt_uid, wanted.channel, wanted.group_size, wanted.metadata)
        )
        if wanted.channel or not wanted.trajectory_uid:  # a trajectory that is opened again may be in any channel
            self.known.add(ref, wanted.channel or TRAIN)
        return gateway_api.TrajectoryOpened(
            trajectory_uid=ref.trajectory_uid,
            prompt_uid=ref.prompt_uid,
            base_url=f"{root}{ref.trajectory_uid}/{ref.prompt_uid}",
            api_key=self.keys.trajectory_key(ref.trajectory_uid, ref.prompt_uid),
        )

    async def complete(self, ref: TrajectoryRef, wanted: gateway_api.CompleteTrajectory) -> gateway_api.TrajectoryEnded:
        await self.known.calls_end(ref.trajectory_uid, LEAVING_SECONDS)
        await self.outbox.settle(ref.trajectory_uid)
        if wanted.channel is not None:
            await self.pool.register_trajectory(Registration(ref.trajectory_uid, ref.prompt_uid, wanted.channel))
        ending = await self.pool.complete_trajectory(ref.trajectory_uid, ref.prompt_uid, wanted.reward, wanted.failure)
        self.known.forget(ref.trajectory_uid)
        return gateway_api.TrajectoryEnded(status=ending)

    async def flush(self, trajectory_uid: str) -> None:
        """The trajectory is completed at another gateway, which waits for what is held here. Further calls ask the pool
        again."""
        self.known.forget(trajectory_uid)
        await self.known.calls_end(trajectory_uid, LEAVING_SECONDS)
        await self.outbox.settle(trajectory_uid)

    async def abort(self, ref: TrajectoryRef) -> gateway_api.TrajectoryEnded:
        await self.outbox.settle(ref.trajectory_uid)
        ending = await self.pool.abort_trajectory(ref.trajectory_uid, ref.prompt_uid)
        self.known.forget(ref.trajectory_uid)
        return gateway_api.TrajectoryEnded(status=ending)
