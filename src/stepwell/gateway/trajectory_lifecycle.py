"""How a black-box rollout or a session begins and ends at this gateway."""

from dataclasses import dataclass, replace
from uuid import uuid4

from stepwell.access.access_keys import AccessKeys
from stepwell.access.caller import Caller, SessionKey
from stepwell.errors import BadRequest, Forgotten, NotPermitted
from stepwell.gateway.call_placement import LONGEST_ID, RESERVED_PREFIXES, UNRECORDED_PREFIXES, CallPlacement
from stepwell.gateway.http.quotas import CallQuotas
from stepwell.gateway.live_sessions import LiveSessions, session_call
from stepwell.gateway.recording.outbox import Outbox
from stepwell.gateway.trajectories import KnownTrajectories
from stepwell.pool.api.ports import StepSink
from stepwell.pool.api.producing import SCRUB_SPOOL, TRAIN, Registration, RewardGiven, TrajectoryRef
from stepwell.pool.api.sessions import RESERVED_UIDS, session_prompt_uid
from stepwell.wire import gateway_api

LEAVING_SECONDS = 1.0
"""How long a completion waits for calls in flight: an agent whose time is over leaves its call at the same moment."""
UNRECORDED, UNSAMPLED = UNRECORDED_PREFIXES


def _of_session_key(wanted: gateway_api.InitTrajectory, key: SessionKey) -> gateway_api.InitTrajectory:
    """The session that the holder of a key may open. NotPermitted if it asks for more."""
    more = wanted.model_fields_set - {"session", "user", "metadata", "capture", "consent", "retention_seconds"}
    if more or wanted.user not in ("", key.user):
        what = ", ".join(more) or "the user"
        raise NotPermitted(f"a session key opens sessions of its user, and cannot choose {what}")
    allowed = {
        "session": True,
        "user": key.user,
        "capture": wanted.capture and key.is_captured,
        "channel": key.channel,
    }
    return wanted.model_copy(update=allowed)


@dataclass(frozen=True, slots=True)
class TrajectoryLifecycle:
    pool: StepSink
    outbox: Outbox
    known: KnownTrajectories
    keys: AccessKeys
    sessions: LiveSessions
    placement: CallPlacement
    quotas: CallQuotas

    async def open(self, wanted: gateway_api.InitTrajectory, root: str, caller: Caller) -> gateway_api.TrajectoryOpened:
        """`root` is the gateway's own address as the caller knows it, with a slash at its end. With a session key, a
        session of its user is opened, and nothing else; that counts as a call of the user."""
        if caller.session is not None:
            wanted = _of_session_key(wanted, caller.session)
        elif caller.is_scoped:
            wanted = wanted.model_copy(update={"channel": caller.channel_or_own(wanted.channel) or TRAIN})
            caller.require_channel(wanted.channel)
        with self.quotas.call_of(caller.quota_name, 0):
            ref = await (self._open_session(wanted) if wanted.session else self._open_rollout(wanted))
        return gateway_api.TrajectoryOpened(
            trajectory_uid=ref.trajectory_uid,
            prompt_uid=ref.prompt_uid,
            base_url=f"{root}{ref.trajectory_uid}/{ref.prompt_uid}",
            api_key=self.keys.trajectory_key(ref.trajectory_uid, ref.prompt_uid, caller),
        )

    async def register(self, ref: TrajectoryRef, wanted: gateway_api.RegisterTrajectory, caller: Caller) -> None:
        ref = await self.last(ref, caller)
        if wanted.channel is not None:
            caller.require_channel(wanted.channel)
        await self.pool.register_trajectory(
            Registration(ref.trajectory_uid, ref.prompt_uid, wanted.channel, metadata=wanted.metadata)
        )
        self.known.forget(ref.trajectory_uid)  # its channel may be another one

    async def give_reward(self, ref: TrajectoryRef, given: gateway_api.Feedback, caller: Caller) -> bool:
        """False if it comes too late to be trained."""
        ref = await self.last(ref, caller)
        await self.outbox.settle(ref.trajectory_uid)
        reward = RewardGiven(
            trajectory_uid=ref.trajectory_uid,
            prompt_uid=ref.prompt_uid,
            value=given.reward,
            source=given.source,
            step_index=given.rewarded_step,
            notes=given.note,
        )
        return await self.pool.give_reward(reward)

    async def last(self, ref: TrajectoryRef, caller: Caller) -> TrajectoryRef:
        """The trajectory that a URL names. NotPermitted if the caller's key is not for its channel."""
        ref = await self.sessions.last(ref)
        if caller.is_scoped:
            caller.require_channel(await self.pool.channel_of(ref.trajectory_uid, ref.prompt_uid))
        return ref

    async def _open_rollout(self, wanted: gateway_api.InitTrajectory) -> TrajectoryRef:
        ref = TrajectoryRef(wanted.trajectory_uid or uuid4().hex, wanted.prompt_uid or uuid4().hex)
        if ref.prompt_uid.startswith(RESERVED_PREFIXES):
            raise BadRequest(f"prompt_uids that begin with {', '.join(RESERVED_PREFIXES)} are those of sessions")
        if ref.trajectory_uid in RESERVED_UIDS:
            raise BadRequest(f"the trajectory_uid {ref.trajectory_uid!r} begins other URLs; choose another")
        await self.pool.register_trajectory(
            Registration(ref.trajectory_uid, ref.prompt_uid, wanted.channel, wanted.group_size, wanted.all_metadata)
        )
        if wanted.channel or not wanted.trajectory_uid:  # a trajectory that is opened again may be in any channel
            self.known.add(ref, wanted.channel or TRAIN)
        return ref

    async def _open_session(self, wanted: gateway_api.InitTrajectory) -> TrajectoryRef:
        """If the session is open already, it is the same one."""
        if wanted.prompt_uid or wanted.group_size:
            raise BadRequest("a session is a group of its own; leave prompt_uid and group_size out")
        session_id = wanted.trajectory_uid or uuid4().hex
        if session_id in RESERVED_UIDS:
            raise BadRequest(f"the trajectory_uid {session_id!r} begins other URLs; choose another")
        if len(session_id) > LONGEST_ID:
            raise BadRequest(f"the trajectory_uid of a session has at most {LONGEST_ID} characters")
        if not wanted.capture:
            return TrajectoryRef(session_id, UNRECORDED + session_id)
        if not self.placement.is_sampled(session_id):
            return TrajectoryRef(session_id, UNSAMPLED + session_id)
        call = session_call(session_id, wanted.user)
        try:
            await self.sessions.open(replace(call, channel=wanted.channel, metadata=wanted.all_metadata))
        except Forgotten:
            return TrajectoryRef(session_id, UNRECORDED + session_id)
        return TrajectoryRef(session_id, session_prompt_uid(session_id))

    async def complete(
        self, ref: TrajectoryRef, wanted: gateway_api.CompleteTrajectory, caller: Caller
    ) -> gateway_api.TrajectoryEnded:
        ref = await self.last(ref, caller)
        if wanted.channel is not None:
            caller.require_channel(wanted.channel)
        await self.known.calls_end(ref.trajectory_uid, LEAVING_SECONDS)
        await self.outbox.settle(ref.trajectory_uid)
        if wanted.channel is not None:
            await self.pool.register_trajectory(Registration(ref.trajectory_uid, ref.prompt_uid, wanted.channel))
        ending = await self.pool.complete_trajectory(ref.trajectory_uid, ref.prompt_uid, wanted.reward, wanted.failure)
        self.known.forget(ref.trajectory_uid)
        return gateway_api.TrajectoryEnded(status=ending)

    async def flush(self, trajectory_uid: str) -> None:
        """The trajectory is completed at another gateway, or by the pool because its session is idle, which waits for
        what is held here. Further calls ask the pool again."""
        if trajectory_uid == SCRUB_SPOOL:
            self.known.forget_all()
            await self.outbox.scrub()
            return
        self.known.forget(trajectory_uid)
        await self.known.calls_end(trajectory_uid, LEAVING_SECONDS)
        await self.outbox.settle(trajectory_uid)
        if called := self.known.sessions_in_flight(trajectory_uid):
            await self.sessions.report(called)  # last, so that the session is not idle when the pool looks again

    async def abort(self, ref: TrajectoryRef, caller: Caller) -> gateway_api.TrajectoryEnded:
        ref = await self.last(ref, caller)
        await self.outbox.settle(ref.trajectory_uid)
        ending = await self.pool.abort_trajectory(ref.trajectory_uid, ref.prompt_uid)
        self.known.forget(ref.trajectory_uid)
        return gateway_api.TrajectoryEnded(status=ending)
