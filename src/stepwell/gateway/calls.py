"""A model call: as its path requests it, whose it is, why it is not recorded, and what is known of it in flight.

Calls that are not recorded are those of clients that keep their tokens themselves, such as environments, and of users
who do not want it. The former call below /unrecorded. Their calls are forwarded like an agent's: every sampling
parameter explicit, to a healthy engine, held while engines pause, continued if an engine breaks off.

- Ids and log-probabilities that the engine gives are consistent, or the call fails; a stream ends in an error then.
- A whole answer has everything. A stream has what it asks for, as an agent's.
- Ids that are made from text are marked as such. A choice whose ids cannot be made has none.
"""

import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from secrets import token_hex
from typing import Any, NamedTuple

from stepwell.errors import BadRequest, EngineUnavailable, PreviousResponseNotFound
from stepwell.gateway.bridge.bridge import PromptPlan
from stepwell.gateway.bridge.digests import RequestDigest
from stepwell.gateway.dialects.dialect import Dialect, ModelCall, StreamWriter
from stepwell.gateway.dialects.openai_choices import ChoicesReply, Wants
from stepwell.gateway.error_responses import ErrorDetails, openai_error
from stepwell.gateway.recording.step_builder import PendingStep
from stepwell.gateway.requests import NO_URL, CallHeaders, CallUrl, Message, Receive
from stepwell.gateway.response_writer import ResponseWriter, Sighting
from stepwell.pool.api.producing import CallBegun, TrajectoryRef
from stepwell.pool.api.sessions import RESERVED_UIDS, SESSION_MARK, SESSION_PREFIX, session_id_of, session_prompt_uid
from stepwell.steps.step import Exactness, Step
from stepwell.wire.gateway_api import UID_PATTERN
from stepwell.wire.openai import Upstream

NO_TRAJECTORY = TrajectoryRef("", "")
EVERYTHING = Wants(ids=True, logprobs=True, usage=True)
"""The parts of a whole answer to a client that keeps its tokens itself."""
UNRECORDED_HEADER = b"x-stepwell-unrecorded"
"""The header in every answer that is not recorded: the cause."""
HALF_AN_ID = 8
"""Bytes."""
SESSION_IDS = b"stepwell session ids 1\0"
"""Separates these HMACs from other uses of the same secret."""


class Unrecorded(StrEnum):
    """Why a call is not recorded."""

    URL = "unrecorded_url"
    """The URL is for calls that are not recorded: /unrecorded, or /generate."""
    HEADER = "header"
    """The call says so."""
    SESSION = "session"
    """The session was opened for calls that are not recorded."""
    KEY = "key"
    """The session key was issued for calls that are not recorded."""
    SAMPLE = "sample"
    """The session is not in the share of sessions that are recorded."""
    POOL = "pool"
    """The pool cannot take a new trajectory now: it is away, or full."""
    DELETED = "forgotten"
    """The data of its subject was deleted on request. Only the metrics tell it: an answer must not say who that is."""


UNRECORDED_PREFIXES: Mapping[str, Unrecorded] = {
    f"unrecorded{SESSION_MARK}": Unrecorded.SESSION,
    f"unsampled{SESSION_MARK}": Unrecorded.SAMPLE,
}
"""How the prompt_uids of sessions begin that are not recorded. The pool does not know them."""
RESERVED_PREFIXES = (SESSION_PREFIX, *UNRECORDED_PREFIXES)
LONGEST_ID = 128 - max(map(len, RESERVED_PREFIXES))
"""The prompt_uid of a session is longer than its id."""


class SessionIds:
    """Makes the ids of sessions. One that is opened for a person whose data was deleted has an HMAC in its id: each
    gateway with the same control keys sees that its calls are not to be recorded, and nobody else can tell it from
    other ids."""

    def __init__(self, secrets: Sequence[bytes] = (b"",), sample: float = 1.0) -> None:
        """The first secret makes ids; all are accepted. `sample` is the share of sessions that are recorded."""
        self._secrets = secrets
        self._sample = sample

    def new(self) -> str:
        return token_hex(2 * HALF_AN_ID)

    def new_unrecorded(self) -> str:
        """An id for a session that is not recorded. It is in the share that is: another one would give itself away."""
        while True:
            nonce = token_hex(HALF_AN_ID)
            session_id = nonce + _seal(self._secrets[0], nonce)
            if self.is_sampled(session_id):
                return session_id

    def is_unrecorded(self, session_id: str) -> bool:
        nonce, seal = session_id[: 2 * HALF_AN_ID], session_id[2 * HALF_AN_ID :]
        if len(seal) != 2 * HALF_AN_ID or not session_id.isascii():
            return False
        return any(hmac.compare_digest(_seal(secret, nonce), seal) for secret in self._secrets)

    def is_sampled(self, name: str) -> bool:
        """Whether the session is recorded. The same for the same name, at every gateway with the same share."""
        number = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
        return number < self._sample * 2**64


@lru_cache(maxsize=10_000)
def _seal(secret: bytes, nonce: str) -> str:
    return hmac.digest(secret, nonce.encode(), "sha256")[:HALF_AN_ID].hex()


def session_id_by_name(name: str) -> str:
    """The name itself if it can stand in a URL, so that whoever knows it finds the session; else its digest."""
    if len(name) <= LONGEST_ID and re.fullmatch(UID_PATTERN, name) and name not in RESERVED_UIDS:
        return name
    return blake2b(name.encode(), digest_size=16).hexdigest()


def check_uids(ref: TrajectoryRef) -> None:
    """BadRequest if the URL lacks a uid, so that another part of it stands in its place."""
    for uid in (ref.trajectory_uid, ref.prompt_uid):
        if uid in RESERVED_UIDS:
            raise BadRequest(
                f"the URL has {uid!r} in the place of a uid; a base_url is .../TRAJECTORY_UID/PROMPT_UID, as POST "
                "/init_trajectory answers it, with or without /v1 at its end"
            )


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


class RequestedCall(NamedTuple):
    """A model call that a client asks for, as its path tells."""

    ref: TrajectoryRef
    """NO_TRAJECTORY if the path names none."""
    dialect: Dialect
    url: CallUrl = NO_URL
    is_whitebox: bool = False
    """Whether the call is below /unrecorded."""
    route: str = ""
    """The path, with the dialect's template at its end."""

    @property
    def names_no_trajectory(self) -> bool:
        """Whether the call belongs to a session of its caller, or its header names the trajectory."""
        return self.ref == NO_TRAJECTORY and not self.is_whitebox


@dataclass(slots=True, eq=False)
class CallInFlight:
    """A call that an engine is asked to answer."""

    kind: str
    """The label of the call in metrics and traces."""
    placed: CallPlace
    call: ModelCall
    pending: PendingStep
    """The facts of the call's steps that are known before its answer."""
    writer: ResponseWriter
    headers: CallHeaders
    stream: StreamWriter
    sighting: Sighting
    scope: Message
    """The scope of the client's request."""
    receive: Receive
    key: str = ""
    """The `key` of its CallBegun."""
    is_whitebox: bool = False
    """Whether this is a call below /unrecorded, whose client keeps its tokens itself."""
    is_abandoned: bool = False
    """The client left, and no other client waits for the answer."""
    is_over: bool = False
    engine: str = ""
    """The address of the engine that answered."""
    prompt_tokens: int = 0
    response_tokens: int = 0
    plan: PromptPlan | None = None
    """The plan by which the call's prompt is made; None without a bridge."""

    @property
    def is_recorded(self) -> bool:
        return self.pending.trajectory_uid != ""

    def announcement(self, uid: str = "") -> CallBegun:
        """The call itself, or that it is given the answer of the call with this uid."""
        step = self.pending
        return CallBegun(
            step.trajectory_uid,
            step.prompt_uid,
            uid or step.uid,
            key=self.key,
            repeats=self.headers.repeats,
            began_at=step.started_at,
        )

    def attributes(self) -> dict[str, str | int]:
        """Attributes for the trace."""
        return {
            "trajectory_uid": self.pending.trajectory_uid,
            "prompt_uid": self.pending.prompt_uid,
            "engine": self.engine,
            "status": self.writer.status,
            "prompt_tokens": self.prompt_tokens,
            "response_tokens": self.response_tokens,
        }

    def count(self, steps: Sequence[Step]) -> None:
        self.prompt_tokens = sum(len(step.prompt_ids) for step in steps[:: self.call.choices_per_prompt])
        self.response_tokens = sum(len(step.response_ids) for step in steps)

    async def fail(self, error: ErrorDetails) -> None:
        self.is_over = True
        await send_error(self.writer, self.call.dialect, error, self.stream)


async def send_error(
    writer: ResponseWriter, dialect: Dialect | None, error: ErrorDetails, stream: StreamWriter | None = None
) -> None:
    """Send an HTTP error; an error event if a stream has begun; nothing if the response has ended."""
    body = dialect.error(error) if dialect else openai_error(error)
    if not writer.status:
        await writer.whole(error.status, body, error.headers)
    elif not writer.is_ended and stream is not None:
        await writer.end(stream.fail(body))


def as_unrecorded(call: ModelCall) -> ModelCall:
    if call.part is not None and call.part.after:
        raise PreviousResponseNotFound("calls that name no trajectory are not stored; send the whole input")
    return call._replace(wants=call.wants if call.stream else EVERYTHING, part=None)


def as_uncaptured(call: ModelCall) -> ModelCall:
    """An agent's call of a part of a conversation, which is answered as always, and leaves nothing behind."""
    if call.part is not None and call.part.after:
        raise PreviousResponseNotFound(
            "a call that is not recorded has no stored response before it; send the whole input"
        )
    return call._replace(part=None)


def add_origins(call: ModelCall, answer: ChoicesReply, steps: Sequence[Step]) -> None:
    """Add to each choice which weights wrote it, how it was sampled, and how exact its ids are.

    Its step is what it would be recorded as.
    """
    require_consistent(steps)
    for choice, step in zip(answer.message["choices"], steps, strict=True):
        if step.exactness is Exactness.RETOKENIZED:
            _add_ids(answer.message if call.upstream is Upstream.CHAT else choice, choice, step)
        choice["exactness"] = step.exactness
        choice["policy_version"] = step.policy_version
        choice["temperature"] = step.temperature
        choice["untrainable"] = step.untrainable
        choice["version_spans"] = [list(span) for span in step.version_spans]


def require_consistent(steps: Sequence[Step]) -> None:
    for step in steps:
        if step.exactness is Exactness.ENGINE and step.quarantine is not None:
            raise EngineUnavailable(f"the engine's answer cannot be trained on: {step.quarantine}")


def _add_ids(prompt_holder: dict[str, Any], choice: dict[str, Any], step: Step) -> None:
    """Adds ids where vLLM has them: a chat's prompt ids are in the answer, a completion's in each choice."""
    prompt_holder["prompt_token_ids"] = step.prompt_ids.tolist() or None
    choice["token_ids"] = step.response_ids.tolist() if step.quarantine is None else None
