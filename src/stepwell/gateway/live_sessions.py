"""Sessions as this gateway serves them: which trajectory the calls of a session belong to now.

- The pool decides it, so any gateway serves any session. What is kept here saves asking for every call.
- A session with a call in flight is not idle: the gateway tells the pool so, now and then.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

from stepwell.access.caller import Caller
from stepwell.common.async_calls import ignore_failure
from stepwell.errors import Forgotten, PoolFull, PoolUnavailable, StepwellError
from stepwell.gateway.trajectories import ASK_PAUSE, ASK_TIMEOUT, MAX_KNOWN, UNCHECKED, KnownTrajectories
from stepwell.gateway.unrecorded_calls import Unrecorded
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.pool.api.sessions import SessionCall, SessionPlace, session_id_of, session_prompt_uid
from stepwell.pool.client import PoolClient

BEAT = 1.0
"""Seconds between two reports of the sessions with a call in flight."""


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """The trajectory that a call of a session belongs to."""

    ref: TrajectoryRef
    channel: str


class LiveSessions:
    def __init__(
        self,
        pool: PoolClient,
        known: KnownTrajectories,
        *,
        answers_unchecked: bool = True,
        ask_timeout: float = ASK_TIMEOUT,
        beat: float = BEAT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`answers_unchecked`: while the pool cannot be asked, calls are answered all the same."""
        self._pool = pool
        self._known = known
        self._answers_unchecked = answers_unchecked
        self._ask_timeout = ask_timeout
        self._beat = beat
        self._clock = clock
        self._ask_again_at = 0.0
        self._current: OrderedDict[str, str] = OrderedDict()
        """By session: the trajectory that it was in when the pool was last asked."""
        self._asking: set[asyncio.Task[SessionPlace | None]] = set()

    async def place(self, call: SessionCall) -> PlacedCall | Unrecorded:
        """Or why the call is to be answered all the same, unrecorded: the pool cannot take a new trajectory now, or the
        data of its user was deleted."""
        uid = self._current.get(call.session_id, "")
        ref = TrajectoryRef(uid, call.prompt_uid)
        if uid and (channel := self._known.cached_channel(ref)) is not None:
            return PlacedCall(ref, channel)
        try:
            place = await self._ask(call, after=uid)
        except PoolUnavailable:
            if not self._answers_unchecked:
                raise
            self._known.unchecked += 1
            return PlacedCall(ref, UNCHECKED) if uid else Unrecorded.POOL
        except PoolFull:
            return Unrecorded.POOL
        except Forgotten:
            return Unrecorded.DELETED
        return self._note(call.session_id, place)

    async def open(self, call: SessionCall) -> PlacedCall | None:
        """None if the data of its user was deleted. A failure of the pool is raised."""
        try:
            place = await self._pool.place_session(call)
        except Forgotten:
            return None
        assert place is not None
        return self._note(call.session_id, place)

    async def last(self, ref: TrajectoryRef) -> TrajectoryRef:
        """The trajectory that a URL names. That of a session's base_url is the last one of the session."""
        session_id = session_id_of(ref.prompt_uid)
        if not session_id or ref.trajectory_uid != session_id:
            return ref
        place = await self._pool.place_session(SessionCall(session_id, "", opens=False))
        return ref if place is None else TrajectoryRef(place.trajectory_uid, ref.prompt_uid)

    async def require_channel(self, session_id: str, caller: Caller) -> None:
        """NotPermitted if the session is there already, in a channel that the caller's key is not for. Nothing of it
        changes: `place` would open its next trajectory."""
        if not caller.is_scoped:
            return
        uid, prompt_uid = self._current.get(session_id, ""), session_prompt_uid(session_id)
        channel = self._known.cached_channel(TrajectoryRef(uid, prompt_uid))
        if channel is None:
            place = await self._pool.place_session(SessionCall(session_id, "", opens=False))
            channel = None if place is None else place.channel
        if channel is not None:
            caller.require_channel(channel)

    async def report(self, refs: Sequence[TrajectoryRef]) -> None:
        """Tell the pool that these sessions have calls in flight."""
        with suppress(StepwellError, TimeoutError):
            async with asyncio.timeout(self._ask_timeout):
                await asyncio.gather(*(self._pool.knows(ref.trajectory_uid, ref.prompt_uid) for ref in refs))

    async def run(self) -> None:
        """Report the sessions with calls in flight, until cancelled."""
        while True:
            await asyncio.sleep(self._beat)
            if refs := self._known.sessions_in_flight():
                await self.report(refs)

    def _note(self, session_id: str, place: SessionPlace) -> PlacedCall:
        self._current[session_id] = place.trajectory_uid
        self._current.move_to_end(session_id)
        if len(self._current) > MAX_KNOWN:
            self._current.popitem(last=False)
        ref = TrajectoryRef(place.trajectory_uid, session_prompt_uid(session_id))
        self._known.add(ref, place.channel)
        return PlacedCall(ref, place.channel)

    async def _ask(self, call: SessionCall, after: str) -> SessionPlace:
        """The question goes on when nobody waits for it any more."""
        if self._answers_unchecked and self._clock() < self._ask_again_at:
            raise PoolUnavailable("the pool did not answer a moment ago")
        asking = asyncio.create_task(self._pool.place_session(_after(call, after)))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        asking.add_done_callback(ignore_failure)
        try:
            async with asyncio.timeout(self._ask_timeout if self._answers_unchecked else None):
                place = await asyncio.shield(asking)
        except (PoolUnavailable, TimeoutError) as failure:
            self._ask_again_at = self._clock() + ASK_PAUSE
            raise PoolUnavailable(str(failure)) from None
        assert place is not None
        return place


def session_call(session_id: str, user: str = "", channel: str | None = None) -> SessionCall:
    """Of a call of a session, which any gateway may have opened."""
    return SessionCall(session_id, uuid4().hex, user, channel)


def _after(call: SessionCall, after: str) -> SessionCall:
    return SessionCall(call.session_id, call.new_uid, call.user, call.channel, call.metadata, after)
