"""Whose data a trajectory is, what they agreed to, and sessions: conversations of live users, which nobody completes.

- The prompt_uid of a session is SESSION_PREFIX and its id, so that every process sees in a base_url that it is one.
- A session is one trajectory after another: when one has ended, the next call opens its successor. Each is a group of
  one. They have the same prompt_uid, so one shard has them all.
- The id of a session is the uid of its first trajectory.
- Consent is a flag in the metadata of a trajectory, as is how long its data is kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stepwell.common.message_format import message
from stepwell.steps.step import Json, JsonObject

SESSION_ROOT = "session"
V1_ROOT = "v1"
"""The first name in the URL of a call whose session is found by its key: one of these two."""
UNRECORDED_ROOT = "unrecorded"
"""The first name in the URL of a call that is not recorded on purpose."""
RESERVED_UIDS = (V1_ROOT, SESSION_ROOT, UNRECORDED_ROOT)
"""These names begin other URLs: no trajectory has one of them."""
SESSION_MARK = "@"
SESSION_PREFIX = f"session{SESSION_MARK}"
SESSION = "session"
"""In a trajectory's metadata: {id, predecessor, user}. The first trajectory of a session has no predecessor."""
CLIENT = "client"
"""In a trajectory's metadata: what the holder of a session key sent with the session. Nothing reads it: rewards,
exports and deletion read what operators and runners say."""
SUBJECT = "subject"
"""In a trajectory's metadata: the pseudonym of the person whose data it is, if it is not the user of a session."""
CONSENT = "consent"
"""In a trajectory's metadata: {train, keep}. A flag that is not there is true."""
RETENTION = "retention_seconds"
"""In a trajectory's metadata: how many seconds its data is kept, if that is less than the pool keeps data."""
IDLE = "idle"
"""How a session ended that had no call for a while."""


def session_prompt_uid(session_id: str) -> str:
    return SESSION_PREFIX + session_id


def session_id_of(prompt_uid: str) -> str:
    """Empty if it is not the prompt_uid of a session."""
    return prompt_uid[len(SESSION_PREFIX) :] if prompt_uid.startswith(SESSION_PREFIX) else ""


def session_metadata(session_id: str, user: str, predecessor: str = "") -> dict[str, Json]:
    """What the metadata of each trajectory of a session has under SESSION."""
    named: dict[str, Json] = {"id": session_id, "user": user}
    return {**named, "predecessor": predecessor} if predecessor else named


def user_of(metadata: JsonObject) -> str:
    """The user whose session it is; empty if there is none."""
    session = metadata.get(SESSION)
    user = session.get("user") if isinstance(session, Mapping) else None
    return user if isinstance(user, str) else ""


def subjects_of(metadata: JsonObject) -> tuple[str, ...]:
    """The people whose data it is: the user of the session, and the subject that its metadata names."""
    if not metadata:
        return ()
    named = metadata.get(SUBJECT)
    return tuple(filter(None, (user_of(metadata), named if isinstance(named, str) else "")))


def may_train(metadata: JsonObject) -> bool:
    """False: its steps are recorded, and no trainer gets them."""
    return _says(metadata, "train")


def may_keep(metadata: JsonObject) -> bool:
    """False: it is neither archived nor exported, and it leaves the pool as soon as it is trained."""
    return _says(metadata, "keep")


def _says(metadata: JsonObject, flag: str) -> bool:
    consent = metadata.get(CONSENT) if metadata else None
    return consent is None or not isinstance(consent, Mapping) or consent.get(flag) is not False


@message
@dataclass(frozen=True, slots=True)
class SessionCall:
    """Which trajectory do the calls of this session belong to now? If none is open, one is opened.

    The answer is a SessionPlace. Asking again is harmless.
    """

    session_id: str
    new_uid: str
    """The uid of the successor, if one is opened."""
    user: str = ""
    channel: str | None = None
    """The channel of the first trajectory. Successors are in the channel of their predecessor."""
    metadata: JsonObject | None = None
    """The metadata of the first trajectory."""
    after: str = ""
    """The last trajectory of the session that the gateway knows, for a shard that does not remember it."""
    gateway: str = ""
    """The gateway that serves the session from now on."""
    opens: bool = True
    """False: no trajectory is opened, and the answer is the last one; None if the shard does not know the session."""

    @property
    def prompt_uid(self) -> str:
        return session_prompt_uid(self.session_id)


@message
@dataclass(frozen=True, slots=True)
class SessionPlace:
    """The trajectory that a session is in."""

    trajectory_uid: str
    channel: str
