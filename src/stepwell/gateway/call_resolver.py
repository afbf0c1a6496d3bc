"""Whose call is this: to which trajectory it belongs, in which channel, and whether it is recorded.

- The URL, a header or the key names the trajectory or the session, or the messages continue a session. The pool
  decides, so any gateway serves any call. What is kept here saves asking for every call; if it is lost, the pool is
  asked again.
- A call of a rollout pays for one lookup: its URL names its trajectory.
- A conversation that its client names has the same session id at every gateway. One without a name is found by the
  digest of its messages up to its last reply, as a step keeps it for the bridge: in this gateway's memory, or else in
  the pool. One that is not found, or has no reply yet, is a new session. Users never share a session.
- While the pool does not answer, calls are answered all the same, unless an operator has said otherwise.
- A session with a call in flight is not idle: the gateway tells the pool so, now and then.
"""

import asyncio
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar
from uuid import uuid4

from stepwell.access.caller import ANYONE, Caller, SessionKey
from stepwell.common.async_calls import ignore_failure
from stepwell.errors import Forgotten, PoolFull, PoolUnavailable, StepwellError, UnknownTrajectory
from stepwell.gateway.bridge.digests import RequestDigest, conversation_digest_of, digest_request
from stepwell.gateway.calls import (
    NO_TRAJECTORY,
    UNRECORDED_PREFIXES,
    SessionIds,
    Unrecorded,
    check_uids,
    session_id_by_name,
)
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.requests import CallHeaders
from stepwell.pool.api.producing import TRAIN, TrajectoryRef
from stepwell.pool.api.sessions import SESSION_MARK, SessionCall, SessionPlace, session_id_of, session_prompt_uid
from stepwell.pool.client import PoolClient
from stepwell.wire.gateway_api import UID_PATTERN
from stepwell.wire.openai import Upstream

log = logging.getLogger("stepwell.gateway")

T = TypeVar("T")

TRAJECTORY_NAME = re.compile(rf"({UID_PATTERN})/({UID_PATTERN})")
UNCHECKED = ""
"""The channel of a call whose trajectory the pool could not be asked for. Such a call is sampled as the agent asks."""
MAX_KNOWN = 100_000
"""Trajectories that are remembered."""
MAX_NAMES = 200_000
"""Names of sessions and of turns that are remembered. Each answer to a client that names no session adds some."""
ASK_TIMEOUT = 2.0
"""Seconds that a call waits for the pool to confirm its trajectory."""
FIND_TIMEOUT = 1.0
"""Seconds that a call waits for the pool to find the session whose conversation it continues."""
ASK_PAUSE = 10.0
"""Seconds until the pool is asked again after it did not answer: for a trajectory, for sessions, for conversations."""
SESSIONS, CONVERSATIONS = "/sessions", "/conversations"
"""The names of questions to the pool that are about no trajectory. No trajectory_uid has a slash."""
BEAT = 1.0
"""Seconds between two reports of the sessions with a call in flight."""


@dataclass(frozen=True, slots=True)
class KeyedConversation:
    """A conversation that is found by its user and its messages, or by the name that its client gives it."""

    session_id: str
    opening: str
    """A name that does not change while the conversation goes on, wherever it is continued."""
    user: str = ""
    asked: RequestDigest | None = None
    """The digest of its messages, if it is known by them."""


@dataclass(frozen=True, slots=True)
class CallPlace:
    ref: TrajectoryRef
    """NO_TRAJECTORY if the call is not recorded."""
    channel: str
    sticky: str
    """Calls with the same name may go to the same engine: the id of the session, or the uid of the trajectory."""
    unrecorded: Unrecorded | None = None
    conversation: KeyedConversation | None = None
    """The conversation of a call whose session was found by its key."""

    @property
    def is_rollout(self) -> bool:
        """Whether the call is recorded, and not in the session of a live user."""
        return self.unrecorded is None and not session_id_of(self.ref.prompt_uid)

    @property
    def shown(self) -> TrajectoryRef | None:
        """The trajectory that the answer names; None if the call is not recorded. The session of a person whose
        data was deleted looks like any other."""
        if self.unrecorded is Unrecorded.DELETED:
            return TrajectoryRef(self.sticky, session_prompt_uid(self.sticky))
        return self.ref if self.unrecorded is None else None


class CallsInFlight:
    """The calls of one trajectory that are in flight; entered by each call. Removes itself when the last one ends."""

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


class CallResolver:
    def __init__(
        self,
        pool: PoolClient,
        ids: SessionIds | None = None,
        *,
        answers_unchecked: bool = True,
        ask_timeout: float = ASK_TIMEOUT,
        find_timeout: float = FIND_TIMEOUT,
        beat: float = BEAT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`answers_unchecked`: while the pool cannot be asked, calls are answered all the same."""
        self.ids = ids or SessionIds()
        self.unchecked = 0
        """Calls that were answered although the pool could not be asked."""
        self.on_drop: Callable[[str], None] = lambda _: None
        """Called with each trajectory that is dropped."""
        self._pool = pool
        self._answers_unchecked = answers_unchecked
        self._ask_timeout = ask_timeout
        self._patience = ask_timeout if answers_unchecked else None
        """Seconds that a call waits for an answer without which it may go on."""
        self._find_timeout = find_timeout
        self._beat = beat
        self._clock = clock
        self._known: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """The prompt_uid and the channel of each trajectory, by its uid."""
        self._names: OrderedDict[tuple[str, ...], str] = OrderedDict()
        """Names by their key. By (session id,): the last trajectory of the session that is known. By (user, digest of
        the messages with a reply, or uid of its step): the session."""
        self._ask_again_at: OrderedDict[str, float] = OrderedDict()
        """The times to ask again, by what the pool did not answer for, so that not every call waits."""
        self._calls: dict[str, CallsInFlight] = {}
        """The calls in flight by trajectory_uid."""
        self._asking: set[asyncio.Task[Any]] = set()
        """Questions to the pool. They go on when nobody waits for them, so that the shard learns who serves what."""

    async def by_url(self, ref: TrajectoryRef, headers: CallHeaders, caller: Caller = ANYONE) -> CallPlace:
        """A call under the base_url of a trajectory or a session. NotPermitted if the caller's key is not for its
        channel, whether it is to be recorded or not."""
        check_uids(ref)
        if SESSION_MARK in ref.prompt_uid:
            kind, mark, session_id = ref.prompt_uid.partition(SESSION_MARK)
            if (cause := UNRECORDED_PREFIXES.get(kind + mark)) is not None:
                return _unrecorded(session_id, cause)
            if session_id_of(ref.prompt_uid):
                await self.require_channel(session_id, caller)
                return await self._in_session(session_id, "", headers)
        channel = await self.channel_of(ref)
        caller.require_channel(channel or None)
        if not headers.is_captured:
            return CallPlace(NO_TRAJECTORY, channel, ref.trajectory_uid, Unrecorded.HEADER)
        return CallPlace(ref, channel, ref.trajectory_uid)

    async def by_key(self, caller: Caller, headers: CallHeaders, call: ModelCall) -> CallPlace:
        """A call whose URL names no session. NotPermitted if the caller's key is not for the channel of new ones."""
        key = session_key_of(caller)
        caller.require_channel(key.channel or TRAIN)
        conversation = await self._conversation(_owner(caller, key), headers.session, call)
        session_id = conversation.session_id
        if not key.is_captured:
            return _unrecorded(session_id, Unrecorded.KEY)
        if not self.ids.is_sampled(conversation.opening):
            return _unrecorded(session_id, Unrecorded.SAMPLE)
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
        elif self.ids.is_sampled(session_id := session_id_by_name(name)):
            await self.require_channel(session_id, caller)
            placed = await self._in_session(session_id, "", headers, channel=caller.channel_or_own(None))
        else:
            placed = _unrecorded(session_id, Unrecorded.SAMPLE)
        if placed.unrecorded is None:
            caller.require_channel(placed.channel or None)
        return placed

    async def channel_of(self, ref: TrajectoryRef) -> str:
        """UnknownTrajectory if the pool would refuse the call's step, before the call costs the engine anything.

        UNCHECKED if the pool cannot be asked and the call is to be answered all the same.
        """
        channel = self._cached_channel(ref)
        if channel is not None:
            return channel
        try:
            channel = await self._ask(
                ref.trajectory_uid,
                self._patience,
                lambda: self._pool.channel_if_open(ref.trajectory_uid, ref.prompt_uid),
            )
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

    async def open_session(self, call: SessionCall) -> SessionPlace | None:
        """The place of a session, which is opened if it is new; None if the data of its user was deleted. A failure of
        the pool is raised."""
        try:
            place = await self._pool.place_session(call)
        except Forgotten:
            return None
        assert place is not None
        self._note_place(call.session_id, place)
        return place

    async def last(self, ref: TrajectoryRef) -> TrajectoryRef:
        """The trajectory that a URL names. The base_url of a session stands for the last one of the session."""
        session_id = session_id_of(ref.prompt_uid)
        if not session_id or ref.trajectory_uid != session_id:
            return ref
        place = await self._pool.place_session(SessionCall(session_id, "", opens=False))
        return ref if place is None else TrajectoryRef(place.trajectory_uid, ref.prompt_uid)

    async def require_channel(self, session_id: str, caller: Caller) -> None:
        """NotPermitted if the session is there already, in a channel that the caller's key is not for. Nothing of it
        changes: to place the call would open its next trajectory."""
        if not caller.is_scoped:
            return
        uid = self._names.get((session_id,), "")
        channel = self._cached_channel(TrajectoryRef(uid, session_prompt_uid(session_id)))
        if channel is None:
            place = await self._pool.place_session(SessionCall(session_id, "", opens=False))
            channel = None if place is None else place.channel
        if channel is not None:
            caller.require_channel(channel)

    def note_answer(
        self, conversation: KeyedConversation, uid: str, replies: Callable[[], Sequence[Mapping[str, Any] | None]]
    ) -> None:
        """Remember an answer before its client can continue it. `uid` is that of its first step."""
        if conversation.asked is None:
            return
        try:
            digests = [
                conversation_digest_of(conversation.asked, reply, {}).replied
                for reply in replies()
                if reply is not None
            ]
        except Exception:
            log.exception("a reply has no digest; what continues it is a new session")
            return
        for turn in (uid, *digests):
            self._name((conversation.user, turn), conversation.session_id)

    def add(self, ref: TrajectoryRef, channel: str) -> None:
        self._known[ref.trajectory_uid] = ref.prompt_uid, channel
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def drop(self, trajectory_uid: str) -> None:
        """The pool is asked again for this trajectory."""
        self._known.pop(trajectory_uid, None)
        self.on_drop(trajectory_uid)

    def drop_all(self) -> None:
        """The data of some trajectories may have been deleted."""
        for trajectory_uid in list(self._known):
            self.drop(trajectory_uid)

    def call_of(self, ref: TrajectoryRef) -> CallsInFlight:
        """A context to be entered while a call of the trajectory is in flight."""
        calls = self._calls.get(ref.trajectory_uid)
        if calls is None:
            calls = self._calls[ref.trajectory_uid] = CallsInFlight(ref, self._calls)
        return calls

    async def calls_end(self, trajectory_uid: str, timeout: float) -> None:
        """Wait until no call of the trajectory is in flight, or for so many seconds."""
        if trajectory_uid in self._calls:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._calls[trajectory_uid].ended.wait()

    async def report_sessions(self, trajectory_uid: str | None = None) -> None:
        """Tell the pool which sessions have calls in flight; only the one of this trajectory, if it is given."""
        calls = self._calls.values() if trajectory_uid is None else filter(None, [self._calls.get(trajectory_uid)])
        refs = [call.ref for call in calls if session_id_of(call.ref.prompt_uid)]
        with suppress(StepwellError, TimeoutError):
            async with asyncio.timeout(self._ask_timeout):
                await asyncio.gather(*(self._pool.channel_if_open(ref.trajectory_uid, ref.prompt_uid) for ref in refs))

    async def run(self) -> None:
        """Report the sessions with calls in flight, until cancelled."""
        while True:
            await asyncio.sleep(self._beat)
            await self.report_sessions()

    async def _in_session(
        self,
        session_id: str,
        user: str,
        headers: CallHeaders,
        conversation: KeyedConversation | None = None,
        channel: str | None = None,
    ) -> CallPlace:
        if not headers.is_captured:
            return _unrecorded(session_id, Unrecorded.HEADER)
        if self.ids.is_unrecorded(session_id):
            return _unrecorded(session_id, Unrecorded.DELETED)
        uid = self._names.get((session_id,), "")
        ref = TrajectoryRef(uid, session_prompt_uid(session_id))
        found = self._cached_channel(ref) if uid else None
        if found is not None:
            self._names.move_to_end((session_id,))
        else:
            call = SessionCall(session_id, uuid4().hex, user, channel, after=uid)
            try:
                place = await self._ask(SESSIONS, self._patience, lambda: self._pool.place_session(call))
            except Forgotten:
                return _unrecorded(session_id, Unrecorded.DELETED)
            except PoolFull:
                return _unrecorded(session_id, Unrecorded.POOL)
            except PoolUnavailable:
                if not self._answers_unchecked:
                    raise
                self.unchecked += 1
                if not uid:
                    return _unrecorded(session_id, Unrecorded.POOL)
                found = UNCHECKED
            else:
                assert place is not None
                ref, found = self._note_place(session_id, place), place.channel
        return CallPlace(ref, found, session_id, conversation=conversation)

    async def _conversation(self, user: str, name: bytes | None, call: ModelCall) -> KeyedConversation:
        if name is not None or call.upstream is not Upstream.CHAT:
            session_id = uuid4().hex if name is None else _digest(user, b"name", name)
            return KeyedConversation(session_id, session_id, user)
        asked = digest_request(call.request)
        session_id = await self._session_continued(user, asked, call) or uuid4().hex
        return KeyedConversation(session_id, _digest(user, b"opening", _opening(call).encode()), user, asked)

    async def _session_continued(self, user: str, asked: RequestDigest, call: ModelCall) -> str:
        """Empty if it is new. The pool has what another gateway recorded, or this one before its restart."""
        if call.part is not None and call.part.after:
            return self._names.get((user, call.part.after), "")
        if asked.reply_at < 0:
            return ""
        if (session_id := self._names.get((user, asked.replied))) is not None:
            return session_id
        try:
            return await self._ask(
                CONVERSATIONS, self._find_timeout, lambda: self._pool.find_session(user, asked.replied)
            )
        except StepwellError:
            return ""

    def _cached_channel(self, ref: TrajectoryRef) -> str | None:
        """None if the pool must be asked."""
        prompt_uid, channel = self._known.get(ref.trajectory_uid, (None, None))
        return channel if prompt_uid == ref.prompt_uid else None

    def _note_place(self, session_id: str, place: SessionPlace) -> TrajectoryRef:
        self._name((session_id,), place.trajectory_uid)
        ref = TrajectoryRef(place.trajectory_uid, session_prompt_uid(session_id))
        self.add(ref, place.channel)
        return ref

    def _name(self, name: tuple[str, ...], meant: str) -> None:
        self._names[name] = meant
        self._names.move_to_end(name)
        if len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)

    async def _ask(self, about: str, patience: float | None, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The pool's answer. With patience, PoolUnavailable if it takes longer, and for a while after it did."""
        if patience is not None and self._clock() < self._ask_again_at.get(about, 0.0):
            raise PoolUnavailable("the pool did not answer a moment ago")
        asking = asyncio.create_task(ask())
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        asking.add_done_callback(ignore_failure)
        try:
            async with asyncio.timeout(patience):
                answer = await asyncio.shield(asking)
        except (PoolUnavailable, TimeoutError) as failure:
            self._ask_again_at[about] = self._clock() + ASK_PAUSE
            if len(self._ask_again_at) > MAX_KNOWN:
                self._ask_again_at.popitem(last=False)
            raise PoolUnavailable(str(failure)) from None
        self._ask_again_at.pop(about, None)
        return answer


def session_key_of(caller: Caller) -> SessionKey:
    """The caller's session key, which says whose its new sessions are. A key that is no session key opens them for
    nobody."""
    return caller.session or SessionKey(channel=caller.channel_or_own(None))


def _owner(caller: Caller, key: SessionKey) -> str:
    """Whose conversations a call may continue. A key for some channels continues those that it began, so that the same
    words in another channel are another session."""
    return f"\0{caller.id}" if caller.is_scoped and caller.session is None else key.user


def _unrecorded(session_id: str, cause: Unrecorded) -> CallPlace:
    return CallPlace(NO_TRAJECTORY, TRAIN, session_id, cause)


def _digest(user: str, kind: bytes, name: bytes) -> str:
    owner = user.encode(errors="surrogatepass")
    return blake2b(b"%s %d:%s%s" % (kind, len(owner), owner, name), digest_size=16).hexdigest()


def _opening(call: ModelCall) -> str:
    """The digest of the messages before the first reply."""
    messages = call.request["messages"]
    replies = (place for place, message in enumerate(messages) if message["role"] == "assistant")
    return digest_request({"messages": messages[: next(replies, len(messages))]}).whole
