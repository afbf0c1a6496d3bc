"""To which trajectory a call belongs, or why it is not recorded.

- A call of a rollout pays for nothing of this: its URL names its trajectory.
- A header can name it too, so that a harness needs one base_url for many rollouts.
"""

import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from secrets import token_hex

from stepwell.access.caller import ANYONE, Caller, SessionKey
from stepwell.errors import BadRequest
from stepwell.gateway.conversations import Conversations, KeyedConversation
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.http.deduplication import CallHeaders
from stepwell.gateway.live_sessions import LiveSessions, session_call
from stepwell.gateway.trajectories import KnownTrajectories
from stepwell.gateway.unrecorded_calls import NO_TRAJECTORY, Unrecorded
from stepwell.pool.api.producing import TRAIN, TrajectoryRef
from stepwell.pool.api.sessions import (
    RESERVED_UIDS,
    SESSION_MARK,
    SESSION_PREFIX,
    session_id_of,
    session_prompt_uid,
)
from stepwell.wire.gateway_api import UID_PATTERN

UNRECORDED_PREFIXES: Mapping[str, Unrecorded] = {
    f"unrecorded{SESSION_MARK}": Unrecorded.SESSION,
    f"unsampled{SESSION_MARK}": Unrecorded.SAMPLE,
}
"""So begin the prompt_uids of sessions that are not recorded. The pool does not know them."""
RESERVED_PREFIXES = (SESSION_PREFIX, *UNRECORDED_PREFIXES)
LONGEST_ID = 128 - max(map(len, RESERVED_PREFIXES))
"""The prompt_uid of a session is longer than its id."""
HALF_AN_ID = 8
"""Bytes."""
SESSION_IDS = b"stepwell session ids 1\0"
"""Separates these HMACs from other uses of the same secret."""
TRAJECTORY_NAME = re.compile(rf"({UID_PATTERN})/({UID_PATTERN})")


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

    @property
    def is_rollout(self) -> bool:
        """It is recorded, and not in the session of a live user."""
        return self.unrecorded is None and not session_id_of(self.ref.prompt_uid)

    @property
    def shown(self) -> TrajectoryRef | None:
        """The trajectory that the answer names; None if the call is not recorded. The session of a person whose
        data was deleted looks like any other."""
        if self.unrecorded is Unrecorded.DELETED:
            return TrajectoryRef(self.sticky, session_prompt_uid(self.sticky))
        return self.ref if self.unrecorded is None else None


class SessionIds:
    """Makes the ids of sessions. One that is opened for a person whose data was deleted has an HMAC in its id: each
    gateway with the same control keys sees that its calls are not to be recorded, and nobody else can tell it from
    other ids."""

    def __init__(self, secrets: Sequence[bytes] = (b"",)) -> None:
        """The first secret makes ids; all are accepted."""
        self._secrets = secrets

    def new(self) -> str:
        return token_hex(2 * HALF_AN_ID)

    def new_unrecorded(self) -> str:
        nonce = token_hex(HALF_AN_ID)
        return nonce + _seal(self._secrets[0], nonce)

    def is_unrecorded(self, session_id: str) -> bool:
        nonce, seal = session_id[: 2 * HALF_AN_ID], session_id[2 * HALF_AN_ID :]
        if len(seal) != 2 * HALF_AN_ID or not session_id.isascii():
            return False
        return any(hmac.compare_digest(_seal(secret, nonce), seal) for secret in self._secrets)


class CallPlacement:
    def __init__(
        self,
        known: KnownTrajectories,
        sessions: LiveSessions,
        conversations: Conversations,
        sample: float = 1.0,
        ids: SessionIds | None = None,
    ) -> None:
        """`sample` is the share of sessions that are recorded."""
        self.conversations = conversations
        self.ids = ids or SessionIds()
        self._known = known
        self._sessions = sessions
        self._sample = sample

    async def by_url(self, ref: TrajectoryRef, headers: CallHeaders, caller: Caller = ANYONE) -> CallPlace:
        """A call under the base_url of a trajectory or a session. NotPermitted if the caller's key is not for its
        channel, whether it is to be recorded or not."""
        check_uids(ref)
        if SESSION_MARK in ref.prompt_uid:
            kind, mark, session_id = ref.prompt_uid.partition(SESSION_MARK)
            if (cause := UNRECORDED_PREFIXES.get(kind + mark)) is not None:
                return CallPlace(NO_TRAJECTORY, TRAIN, session_id, cause)
            if session_id_of(ref.prompt_uid):
                await self._sessions.require_channel(session_id, caller)
                return await self._in_session(session_id, "", headers)
        channel = await self._known.channel_of(ref)
        caller.require_channel(channel or None)
        if not headers.is_captured:
            return CallPlace(NO_TRAJECTORY, channel, ref.trajectory_uid, Unrecorded.HEADER)
        return CallPlace(ref, channel, ref.trajectory_uid)

    async def by_key(self, caller: Caller, headers: CallHeaders, call: ModelCall) -> CallPlace:
        """A call whose URL names no session. NotPermitted if the caller's key is not for the channel of new ones."""
        key = session_key_of(caller)
        caller.require_channel(key.channel or TRAIN)
        conversation = await self.conversations.find(_owner(caller, key), headers.session, call)
        session_id = conversation.session_id
        if not key.is_captured:
            return CallPlace(NO_TRAJECTORY, TRAIN, session_id, Unrecorded.KEY)
        if not self.is_sampled(conversation.opening):
            return CallPlace(NO_TRAJECTORY, TRAIN, session_id, Unrecorded.SAMPLE)
        placed = await self._in_session(session_id, key.user, headers, conversation, key.channel)
        if placed.unrecorded is None and placed.channel:
            caller.require_channel(placed.channel)  # its user may have begun it with another key
        return placed

    async def by_header(self, caller: Caller, headers: CallHeaders) -> CallPlace:
        """A call whose header names its trajectory, `trajectory_uid/prompt_uid`, or a session, which is opened if it is
        new. NotPermitted if the caller's key is not for its channel."""
        name = (headers.session or b"").decode("latin-1")
        if (named := TRAJECTORY_NAME.fullmatch(name)) is not None:
            placed = await self.by_url(TrajectoryRef(named[1], named[2]), headers, caller)
        elif self.is_sampled(session_id := session_id_by_name(name)):
            await self._sessions.require_channel(session_id, caller)
            placed = await self._in_session(session_id, "", headers, channel=caller.channel_or_own(None))
        else:
            placed = CallPlace(NO_TRAJECTORY, TRAIN, session_id, Unrecorded.SAMPLE)
        if placed.unrecorded is None:
            caller.require_channel(placed.channel or None)
        return placed

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
        if self.ids.is_unrecorded(session_id):
            return CallPlace(NO_TRAJECTORY, TRAIN, session_id, Unrecorded.DELETED)
        placed = await self._sessions.place(session_call(session_id, user, channel))
        if isinstance(placed, Unrecorded):
            return CallPlace(NO_TRAJECTORY, TRAIN, session_id, placed)
        return CallPlace(placed.ref, placed.channel, session_id, conversation=conversation)


def check_uids(ref: TrajectoryRef) -> None:
    """BadRequest if the URL lacks a uid, so that another part of it stands in its place."""
    for uid in (ref.trajectory_uid, ref.prompt_uid):
        if uid in RESERVED_UIDS:
            raise BadRequest(
                f"the URL has {uid!r} in the place of a uid; a base_url is .../TRAJECTORY_UID/PROMPT_UID, as POST "
                "/init_trajectory answers it, with or without /v1 at its end"
            )


def session_key_of(caller: Caller) -> SessionKey:
    """What the caller's key says of the sessions that it opens. A key that is no session key opens them for nobody."""
    return caller.session or SessionKey(channel=caller.channel_or_own(None))


def _owner(caller: Caller, key: SessionKey) -> str:
    """Whose conversations a call may continue. A key for some channels continues those that it began, so that the same
    words in another channel are another session."""
    return f"\0{caller.id}" if caller.is_scoped and caller.session is None else key.user


@lru_cache(maxsize=10_000)
def _seal(secret: bytes, nonce: str) -> str:
    return hmac.digest(secret, nonce.encode(), "sha256")[:HALF_AN_ID].hex()


def session_id_by_name(name: str) -> str:
    """The name itself if it can stand in a URL, so that whoever knows it finds the session; else its digest."""
    if len(name) <= LONGEST_ID and re.fullmatch(UID_PATTERN, name) and name not in RESERVED_UIDS:
        return name
    return blake2b(name.encode(), digest_size=16).hexdigest()
