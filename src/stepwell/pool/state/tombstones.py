"""Who was forgotten: keyed hashes of subjects, and of the names of their trajectories and sessions.

- No text of a subject is kept. A name that arrives is hashed and looked up.
- All shards of a pool have the same key, so that they agree about the hashes.
- The tombstone of a subject is never removed. Its record says what was removed so far, and whether all of it is.
- There is one more, for what is too old. It is of the last run, and has the names of that run: later data of the same
  names is taken.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from stepwell.pool.api.retention import due_at
from stepwell.pool.api.sessions import session_id_of, subjects_of
from stepwell.pool.state.running_time import RunningTime
from stepwell.steps.step import JsonObject

FORGOTTEN = "forgotten"
"""The cause of steps that were removed with their subject."""
EXPIRED = "expired"
"""The cause of steps that were removed because of their age."""
AGE = "age"
"""The place of the digest in the one tombstone for what is too old."""
DIGEST_SIZE = 16
OLDER_THAN = "older_than"
"""In `removed`, of what is too old: from how many seconds on; None if only the data's own retention counts."""
RUNNING_TIME = "running_time"
"""In `removed`: True if data is too old only after it has been here for as long while the pool ran. The wall clock may
be wrong."""
REMOVED = ("trajectories", "files", "late_rewards", "quarantined")
ENTRIES = "_entries"
"""In `removed`, after the name of a slice: how many rows of it."""


@dataclass(slots=True)
class Tombstone:
    subject: str
    """The digest of the subject."""
    at: float
    """When it was first asked for, in seconds of the wall clock."""
    is_done: bool = False
    """Everything is removed, from files too."""
    removed: dict[str, Any] = field(default_factory=dict)
    """What was removed so far, in plain values: see pool/api/forgetting.py."""

    @property
    def is_of_age(self) -> bool:
        """Is it for what is too old, and not for a subject?"""
        return self.subject == AGE

    def due_at(self, born: float, metadata: JsonObject) -> float:
        """When data that was born then is too old, by the wall clock."""
        return due_at(born, metadata, self.removed.get(OLDER_THAN))

    @property
    def has_removed(self) -> bool:
        return any(found for what, found in self.removed.items() if what in REMOVED or what.endswith(ENTRIES))


class Tombstones:
    def __init__(self) -> None:
        self.key = b""
        """The pool's uid."""
        self.subjects: dict[str, Tombstone] = {}
        """By the digest of the subject."""
        self.names: set[str] = set()
        """Digests of the uids of their trajectories, and of the prompt_uids of their sessions."""
        self.running = RunningTime()

    def __bool__(self) -> bool:
        return bool(self.subjects)

    @property
    def unfinished(self) -> list[Tombstone]:
        return [tombstone for tombstone in self.subjects.values() if not tombstone.is_done]

    def is_due(self, tombstone: Tombstone, born: float, metadata: JsonObject, arrived: float | None = None) -> bool:
        """Is data too old that was born then, and came to the pool then?"""
        due = tombstone.due_at(born, metadata)
        if due > tombstone.at or not tombstone.removed.get(RUNNING_TIME):
            return due <= tombstone.at
        return self.running.since(arrived or born) >= due - born

    def digest(self, text: str) -> str:
        return blake2b(text.encode(errors="surrogatepass"), key=self.key, digest_size=DIGEST_SIZE).hexdigest()

    def subject_digest(self, metadata: JsonObject) -> str:
        """Of the first subject; empty if there is none."""
        return next(map(self.digest, subjects_of(metadata)), "")

    def is_of(self, subject: str, metadata: JsonObject) -> bool:
        """Does this metadata name the subject with this digest?"""
        return any(self.digest(found) == subject for found in subjects_of(metadata))

    def covers(self, metadata: JsonObject) -> bool:
        """Does it name a subject that was forgotten?"""
        return bool(self.subjects) and any(self.digest(found) in self.subjects for found in subjects_of(metadata))

    def covers_user(self, user: str) -> bool:
        return bool(self.subjects and user) and self.digest(user) in self.subjects

    def has_name(self, trajectory_uid: str, prompt_uid: str = "") -> bool:
        """Is it a trajectory of a forgotten subject? The prompt_uid counts if it is that of a session."""
        if not self.names:
            return False
        return any(self.digest(name) in self.names for name in names_of(trajectory_uid, prompt_uid))

    def named_by(self, tombstone: Tombstone) -> Callable[[str, str], bool]:
        """Is it a trajectory with this uid and prompt_uid that the tombstone has removed?"""
        if not tombstone.is_of_age:
            return self.has_name
        return lambda trajectory_uid, _: self.digest(trajectory_uid) in tombstone.removed.get("trajectories", ())

    def new_names(self, names: Iterable[str]) -> list[str]:
        """The digests that are not known yet, in order."""
        return [digest for digest in dict.fromkeys(map(self.digest, names)) if digest not in self.names]


def names_of(trajectory_uid: str, prompt_uid: str) -> list[str]:
    """What belongs to one subject alone: a prompt of a dataset does not, that of a session does."""
    return [trajectory_uid, prompt_uid] if session_id_of(prompt_uid) else [trajectory_uid]
