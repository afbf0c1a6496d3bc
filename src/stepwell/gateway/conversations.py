"""Tells the conversations of one user apart: by the name that the client sends, or by what the messages continue.

- A named conversation has the same session id at every gateway.
- One without a name is found by the digest of its messages up to its last reply, as a step keeps it for the bridge: in
  this gateway's memory, or else in the pool. One that is not found, or has no reply yet, is a new session.
- Users never share a session, whatever they send.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from uuid import uuid4

from stepwell.errors import StepwellError
from stepwell.gateway.bridge.digests import RequestDigest, digest_request, lineage_of
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.pool.client import PoolClient
from stepwell.wire.openai import Upstream

log = logging.getLogger("stepwell.gateway")

MAX_TURNS = 100_000
"""Turns of conversations without a name that are remembered here."""
POOL_TIMEOUT = 1.0
ASK_PAUSE = 10.0
"""Seconds until the pool is asked again after it did not answer."""


@dataclass(frozen=True, slots=True)
class KeyedConversation:
    session_id: str
    opening: str
    """A name that does not change while the conversation goes on, wherever it is continued."""
    user: str = ""
    asked: RequestDigest | None = None
    """Of its messages, if it is known by them."""


class Conversations:
    def __init__(
        self, pool: PoolClient, *, pool_timeout: float = POOL_TIMEOUT, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._pool_timeout = pool_timeout
        self._clock = clock
        self._ask_again_at = 0.0
        self._turns: OrderedDict[tuple[str, str], str] = OrderedDict()
        """By user, and digest of the messages with a reply or uid of its step: the session."""

    async def find(self, user: str, name: bytes | None, call: ModelCall) -> KeyedConversation:
        if name is not None:
            session_id = _digest(user, b"name", name)
            return KeyedConversation(session_id, session_id, user)
        if call.upstream is not Upstream.CHAT:
            session_id = uuid4().hex
            return KeyedConversation(session_id, session_id, user)
        asked = digest_request(call.request)
        session_id = await self._find(user, asked, call) or uuid4().hex
        return KeyedConversation(session_id, _digest(user, b"opening", _opening(call).encode()), user, asked)

    def note(
        self, conversation: KeyedConversation, uid: str, replies: Callable[[], Sequence[Mapping[str, Any] | None]]
    ) -> None:
        """Remember an answer before its client can continue it. `uid` is that of its first step."""
        if conversation.asked is None:
            return
        try:
            digests = [lineage_of(conversation.asked, reply, {}).replied for reply in replies() if reply is not None]
        except Exception:
            log.exception("a reply has no digest; what continues it is a new session")
            return
        for turn in (uid, *digests):
            self._turns[conversation.user, turn] = conversation.session_id
            self._turns.move_to_end((conversation.user, turn))
        while len(self._turns) > MAX_TURNS:
            self._turns.popitem(last=False)

    async def _find(self, user: str, asked: RequestDigest, call: ModelCall) -> str:
        """Empty if it is new."""
        if call.part is not None and call.part.after:
            return self._turns.get((user, call.part.after), "")
        if asked.reply_at < 0:
            return ""
        return self._turns.get((user, asked.replied)) or await self._ask_pool(user, asked.replied)

    async def _ask_pool(self, user: str, replied: str) -> str:
        """What another gateway recorded, or this one before its restart."""
        if self._clock() < self._ask_again_at:
            return ""
        try:
            async with asyncio.timeout(self._pool_timeout):
                return await self._pool.find_session(user, replied)
        except (StepwellError, TimeoutError):
            self._ask_again_at = self._clock() + ASK_PAUSE
            return ""


def _digest(user: str, kind: bytes, name: bytes) -> str:
    owner = user.encode(errors="surrogatepass")
    return blake2b(b"%s %d:%s%s" % (kind, len(owner), owner, name), digest_size=16).hexdigest()


def _opening(call: ModelCall) -> str:
    """The digest of the messages before the first reply."""
    messages = call.request["messages"]
    replies = (place for place, message in enumerate(messages) if message["role"] == "assistant")
    return digest_request({"messages": messages[: next(replies, len(messages))]}).whole
