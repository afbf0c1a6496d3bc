"""How a black-box rollout or a session begins and ends at this gateway."""

import logging
from dataclasses import dataclass
from hashlib import blake2b
from uuid import uuid4

from stepwell.access.access_keys import AccessKeys
from stepwell.access.caller import Caller, SessionKey
from stepwell.errors import BadRequest, NotPermitted, TooLarge
from stepwell.gateway.call_resolver import CallResolver
from stepwell.gateway.calls import LONGEST_ID, RESERVED_PREFIXES, UNRECORDED_PREFIXES, check_uids
from stepwell.gateway.metrics import GatewayMetrics
from stepwell.gateway.recording.outbox import Outbox
from stepwell.gateway.requests import CallQuotas
from stepwell.pool.api.producing import SCRUB_SPOOL, TRAIN, Registration, RewardGiven, TrajectoryRef
from stepwell.pool.api.sessions import CLIENT, SessionCall, session_prompt_uid
from stepwell.pool.client import PoolClient
from stepwell.wire import gateway_api

log = logging.getLogger("stepwell.gateway")

LEAVING_SECONDS = 1.0
"""How long a completion waits for calls in flight: an agent whose time is over leaves its call at the same moment."""
SESSION_METADATA = 16 * 2**10
"""Bytes of JSON that the holder of a session key may send with a session."""
UNRECORDED, UNSAMPLED = UNRECORDED_PREFIXES


def own_prompt_uid(trajectory_uid: str) -> str:
    """The prompt_uid of a trajectory that is opened without one. Every gateway can tell it from the trajectory_uid."""
    return blake2b(trajectory_uid.encode(), digest_size=16).hexdigest()


def _of_session_key(wanted: gateway_api.InitTrajectory, key: SessionKey) -> gateway_api.InitTrajectory:
    """The session that the holder of a key may open. NotPermitted if it asks for more."""
    more = wanted.model_fields_set - {"session", "user", "metadata", "capture", "consent", "retention_seconds"}
    if not wanted.capture and key.is_captured:
        more |= {"capture"}
    if more or wanted.user not in ("", key.user):
        what = ", ".join(sorted(more)) or "the user"
        raise NotPermitted(f"a session key opens sessions of its user, and cannot choose {what}")
    if len(wanted.model_dump_json(include={"metadata"})) > SESSION_METADATA:
        raise TooLarge(f"a session key sends at most {SESSION_METADATA >> 10} KiB of metadata; a runner's key may more")
    allowed = {
        "session": True,
        "user": key.user,
        "capture": wanted.capture and key.is_captured,
        "channel": key.channel,
        "metadata": {CLIENT: wanted.metadata} if wanted.metadata else {},
    }
    return wanted.model_copy(update=allowed)


@dataclass(frozen=True, slots=True)
class TrajectoryLifecycle:
    pool: PoolClient
    outbox: Outbox
    resolver: CallResolver
    keys: AccessKeys
    quotas: CallQuotas
    metrics: GatewayMetrics

    async def open(
        self, wanted: gateway_api.InitTrajectory, root: str, caller: Caller, *, is_key_in_url: bool = False
    ) -> gateway_api.TrajectoryOpened:
        """`root` is the gateway's own address as the caller knows it, with a slash at its end. If that contained the
        caller's key, so does the base_url contain the trajectory's. With a session key, a session of its user is
        opened, and nothing else; that counts as a call of the user."""
        if caller.session is not None:
            wanted = _of_session_key(wanted, caller.session)
        elif caller.is_scoped:
            wanted = wanted.model_copy(update={"channel": caller.channel_or_own(wanted.channel) or TRAIN})
            caller.require_channel(wanted.channel)
        with self.quotas.call_of(caller.quota_name, 0):
            ref = await (self._open_session if wanted.session else self._open_rollout)(wanted, caller)
        if is_key_in_url and not (self.keys.open or wanted.session or wanted.trajectory_uid):
            # A caller that chose the uid may have chosen somebody else's.
            root = root.replace("://", f"://:{self.keys.owner_key(ref.trajectory_uid, caller)}@", 1)
        return gateway_api.TrajectoryOpened(
            trajectory_uid=ref.trajectory_uid,
            prompt_uid=ref.prompt_uid,
            base_url=f"{root}{ref.trajectory_uid}/{ref.prompt_uid}/v1",
            api_key=self.keys.trajectory_key(ref.trajectory_uid, ref.prompt_uid, caller),
        )

    async def register(self, ref: TrajectoryRef, wanted: gateway_api.RegisterTrajectory, caller: Caller) -> None:
        """Adds to what the pool knows of a trajectory. UnknownTrajectory if it was not opened."""
        check_uids(ref)
        if wanted.channel is not None:
            caller.require_channel(wanted.channel)
        if not await self._regroup(ref, caller):
            ref = await self.last(ref, caller)
        await self.pool.register_trajectory(
            Registration(ref.trajectory_uid, ref.prompt_uid, wanted.channel, metadata=wanted.metadata, opens=False)
        )
        self.resolver.drop(ref.trajectory_uid)  # its channel may be another one

    async def _regroup(self, ref: TrajectoryRef, caller: Caller) -> bool:
        """Whether the trajectory was opened without a prompt_uid, and has now joined the group that the URL names."""
        alone = TrajectoryRef(ref.trajectory_uid, own_prompt_uid(ref.trajectory_uid))
        if ref == alone or ref.prompt_uid.startswith(RESERVED_PREFIXES):
            return False
        channel = await self.pool.channel_if_open(alone.trajectory_uid, alone.prompt_uid)
        if channel is None:
            return False
        caller.require_channel(channel)
        await self.resolver.calls_end(ref.trajectory_uid, LEAVING_SECONDS)
        await self.outbox.settle(ref.trajectory_uid)  # so that the pool sees every step, and refuses
        await self.pool.move_trajectory(alone.trajectory_uid, alone.prompt_uid, ref.prompt_uid)
        return True

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
        check_uids(ref)
        ref = await self.resolver.last(ref)
        if caller.is_scoped:
            caller.require_channel(await self.pool.channel_of(ref.trajectory_uid, ref.prompt_uid))
        return ref

    async def _open_rollout(self, wanted: gateway_api.InitTrajectory, caller: Caller) -> TrajectoryRef:
        uid = wanted.trajectory_uid or uuid4().hex
        ref = TrajectoryRef(uid, wanted.prompt_uid or own_prompt_uid(uid))
        if ref.prompt_uid.startswith(RESERVED_PREFIXES):
            raise BadRequest(f"prompt_uids that begin with {', '.join(RESERVED_PREFIXES)} are those of sessions")
        opened_in = (
            await self.pool.channel_of(uid, ref.prompt_uid) if wanted.trajectory_uid and caller.is_scoped else None
        )
        if opened_in is not None:
            caller.require_channel(opened_in)  # else it would move to the channel that the caller names
        await self.pool.register_trajectory(
            Registration(ref.trajectory_uid, ref.prompt_uid, wanted.channel, wanted.group_size, wanted.all_metadata)
        )
        if wanted.channel or not wanted.trajectory_uid:  # a trajectory that is opened again may be in any channel
            self.resolver.add(ref, wanted.channel or TRAIN)
        return ref

    async def _open_session(self, wanted: gateway_api.InitTrajectory, caller: Caller) -> TrajectoryRef:
        """If the session is open already, it is the same one. That of a person whose data was deleted looks like any
        other, unless the caller, who cannot have a session key, chooses its id."""
        if wanted.prompt_uid or wanted.group_size:
            raise BadRequest("a session is a group of its own; leave prompt_uid and group_size out")
        ids = self.resolver.ids
        session_id = wanted.trajectory_uid or ids.new()
        if len(session_id) > LONGEST_ID:
            raise BadRequest(f"the trajectory_uid of a session has at most {LONGEST_ID} characters")
        if wanted.trajectory_uid:
            await self.resolver.require_channel(session_id, caller)
        if not wanted.capture:
            return TrajectoryRef(session_id, UNRECORDED + session_id)
        if not ids.is_sampled(session_id):
            return TrajectoryRef(session_id, UNSAMPLED + session_id)
        call = SessionCall(session_id, uuid4().hex, wanted.user, wanted.channel, wanted.all_metadata)
        place = await self.resolver.open_session(call)
        if place is not None:
            caller.require_channel(place.channel)
        elif wanted.trajectory_uid:
            return TrajectoryRef(session_id, UNRECORDED + session_id)
        else:
            session_id = ids.new_unrecorded()
        return TrajectoryRef(session_id, session_prompt_uid(session_id))

    async def complete(
        self, ref: TrajectoryRef, wanted: gateway_api.CompleteTrajectory, caller: Caller
    ) -> gateway_api.TrajectoryEnded:
        ref = await self.last(ref, caller)
        if wanted.channel is not None:
            caller.require_channel(wanted.channel)
        await self.resolver.calls_end(ref.trajectory_uid, LEAVING_SECONDS)
        await self.outbox.settle(ref.trajectory_uid)
        if wanted.channel is not None:
            await self.pool.register_trajectory(
                Registration(ref.trajectory_uid, ref.prompt_uid, wanted.channel, opens=False)
            )
        ending = await self.pool.complete_trajectory(ref.trajectory_uid, ref.prompt_uid, wanted.reward, wanted.failure)
        self.resolver.drop(ref.trajectory_uid)
        self.metrics.rollout_ended(wanted.exception)
        return gateway_api.TrajectoryEnded(status=ending)

    async def flush(self, trajectory_uid: str) -> None:
        """The trajectory is completed at another gateway, or by the pool because its session is idle, which waits for
        what is held here. Further calls ask the pool again."""
        if trajectory_uid == SCRUB_SPOOL:
            self.resolver.drop_all()
            await self.outbox.scrub()
            return
        self.resolver.drop(trajectory_uid)
        await self.resolver.calls_end(trajectory_uid, LEAVING_SECONDS)
        await self.outbox.settle(trajectory_uid)
        await self.resolver.report_sessions(trajectory_uid)  # last: it is not idle when the pool looks again

    async def abort(
        self, ref: TrajectoryRef, wanted: gateway_api.AbortTrajectory, caller: Caller
    ) -> gateway_api.TrajectoryEnded:
        ref = await self.last(ref, caller)
        await self.outbox.settle(ref.trajectory_uid)
        ending = await self.pool.abort_trajectory(ref.trajectory_uid, ref.prompt_uid)
        self.resolver.drop(ref.trajectory_uid)
        self.metrics.rollout_ended(wanted.exception)
        log.info("trajectory %s was aborted: %s", ref.trajectory_uid, wanted.reason or "no reason given")
        return gateway_api.TrajectoryEnded(status=ending)
