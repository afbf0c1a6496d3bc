"""To which trajectory a call belongs, or why it is not recorded.

A call of a rollout pays for nothing of this: its URL names its trajectory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from stepwell.access.caller import SessionKey
from stepwell.gateway.conversations import Conversations, KeyedConversation
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.http.deduplication import CallHeaders
from stepwell.gateway.live_sessions import LiveSessions, session_call
from stepwell.gateway.trajectories import KnownTrajectories
from stepwell.gateway.unrecorded_calls import NO_TRAJECTORY, Unrecorded
from stepwell.pool.api.producing import TRAIN, TrajectoryRef
from stepwell.pool.api.sessions import SESSION_MARK, SESSION_PREFIX, session_id_of

UNRECORDED_PREFIXES: Mapping[str, Unrecorded] = {
    f"unrecorded{SESSION_MARK}": Unrecorded.SESSION,
    f"unsampled{SESSION_MARK}": Unrecorded.SAMPLE,
}
"""So begin the prompt_uids of sessions that are not recorded. The pool does not know them."""
RESERVED_PREFIXES = (SESSION_PREFIX, *UNRECORDED_PREFIXES)


@dataclass(frozen=True, slots=True)
class CallPlace:
    ref: TrajectoryRef
    """NO_TRAJECTORY if the call is not recorded."""
    channel: str
    sticky: str
    """Calls with the same name may go to the same engine: the id of the session, or the uid of the trajectory."""
    unrecorded: Unrecorded | None = None
    conversation: KeyedConversation | None = None
    """Of a call whose session was found by its key."""


class CallPlacement:
    def __init__(
        self, known: KnownTrajectories, sessions: LiveSessions, conversations: Conversations, sample: float = 1.0
    ) -> None:
        """`sample` is the share of sessions that are recorded."""
        self.conversations = conversations
        self._known = known
        self._sessions = sessions
        self._sample = sample

    async def by_url(self, ref: TrajectoryRef, headers: CallHeaders) -> CallPlace:
        """A call under the base_url of a trajectory or a session."""
        if SESSION_MARK in ref.prompt_uid:
            kind, mark, session_id = ref.prompt_uid.partition(SESSION_MARK)
            if (cause := UNRECORDED_PREFIXES.get(kind + mark)) is not None:
                return CallPlace(NO_TRAJECTORY, TRAIN, session_id, cause)
            if session_id_of(ref.prompt_uid):
                return await self._in_session(session_id, "", headers)
        channel = await self._known.channel_of(ref)
        if not headers.is_captured:
            return CallPlace(NO_TRAJECTORY, channel, ref.trajectory_uid, Unrecorded.HEADER)
        return CallPlace(ref, channel, ref.trajectory_uid)

    async def by_key(self, key: SessionKey, headers: CallHeaders, call: ModelCall) -> CallPlace:
        """A call of a user whose URL names no session."""
        conversation = await self.conversations.find(key.user, headers.session, call)
        session_id = conversation.session_id
        if not key.is_captured:
            return CallPlace(NO_TRAJECTORY, TRAIN, session_id, Unrecorded.KEY)
        if not self.is_sampled(conversation.opening):
            return CallPlace(NO_TRAJECTORY, TRAIN, session_id, Unrecorded.SAMPLE)
        return await self._in_session(session_id, key.user, headers, conversation, key.channel)

    def is_sampled(self, name: str) -> bool:
        """The same for the same name, at every gateway with the same share."""
        number = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
        return number < self._sample * 2**64

    async def _in_session(
        self,
        session_id: str,
        user: str,
        headers: CallHeaders,
        conversation: KeyedConversation | None = None,
        channel: str | None = None,
    ) -> CallPlace:
        if not headers.is_captured:
            return CallPlace(NO_TRAJECTORY, TRAIN, session_id, Unrecorded.HEADER)
        placed = await self._sessions.place(session_call(session_id, user, channel))
        if placed is None:
            return CallPlace(NO_TRAJECTORY, TRAIN, session_id, Unrecorded.POOL)
        return CallPlace(placed.ref, placed.channel, session_id, conversation=conversation)
