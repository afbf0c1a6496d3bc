"""What the pool takes nothing of any more: keyed hashes of subjects, and of the names of trajectories and sessions.

- No text of a subject is kept. A name that arrives is hashed and looked up.
- All shards of a pool have the same key, so that they agree about the hashes.
- A tombstone of a subject is never removed. What its data was, and whether all of it is gone, is noted in it by the
  slice that removes the data.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias

from stepwell.errors import Forgotten
from stepwell.pool.api.sessions import session_id_of, subjects_of
from stepwell.steps.step import JsonObject

DIGEST_SIZE = 16
AGE = "age"
"""The place of the digest in the one tombstone for what is too old: it refuses nothing."""
OLDER_THAN = "older_than"
"""In `removed`, of what is too old: from how many seconds on; None if only the data's own retention counts."""
DELETED = "the data of this subject was deleted on request, and no more of it is recorded"


@dataclass(slots=True)
class Tombstone:
    subject: str
    """The digest of the subject."""
    at: float
    """When it was first asked for, in seconds of the wall clock."""
    is_done: bool = False
    """Everything is removed, from files too."""
    removed: dict[str, Any] = field(default_factory=dict)
    """What was removed so far, in plain values."""

    @property
    def is_of_age(self) -> bool:
        """Is it for what is too old, and not for a subject?"""
        return self.subject == AGE


class Tombstones:
    def __init__(self) -> None:
        self.key = b""
        """The pool's uid."""
        self.subjects: dict[str, Tombstone] = {}
        """By the digest of the subject."""
        self.names: set[str] = set()
        """Digests of the uids of trajectories, and of the prompt_uids of sessions."""
        self.running = RunningTime()

    @property
    def unfinished(self) -> list[Tombstone]:
        return [tombstone for tombstone in self.subjects.values() if not tombstone.is_done]

    def digest(self, text: str) -> str:
        return blake2b(text.encode(errors="surrogatepass"), key=self.key, digest_size=DIGEST_SIZE).hexdigest()

    def subject_digest(self, metadata: JsonObject) -> str:
        """The digest of the first subject; empty if there is none."""
        return next(map(self.digest, subjects_of(metadata)), "")

    def is_of(self, subject: str, metadata: JsonObject) -> bool:
        """Does this metadata name the subject with this digest?"""
        return any(self.digest(found) == subject for found in subjects_of(metadata))

    def covers_user(self, user: str) -> bool:
        return bool(self.subjects and user) and self.digest(user) in self.subjects

    def has_name(self, trajectory_uid: str, prompt_uid: str = "") -> bool:
        """Is nothing of this trajectory taken any more? The prompt_uid counts if it is that of a session."""
        if not self.names:
            return False
        return any(self.digest(name) in self.names for name in names_of(trajectory_uid, prompt_uid))

    def check_user(self, user: str) -> None:
        """Forgotten if nothing of this user is taken any more."""
        if self.covers_user(user):
            raise Forgotten(DELETED)

    def check(self, trajectory_uid: str, prompt_uid: str, metadata: JsonObject) -> None:
        """Forgotten if nothing of this trajectory, or of its subjects, is taken any more."""
        if not self.subjects:
            return
        if self.has_name(trajectory_uid, prompt_uid):
            raise Forgotten(DELETED)
        for subject in subjects_of(metadata):
            self.check_user(subject)


def names_of(trajectory_uid: str, prompt_uid: str) -> list[str]:
    """What belongs to one subject alone: a prompt of a dataset does not, that of a session does."""
    return [trajectory_uid, prompt_uid] if session_id_of(prompt_uid) else [trajectory_uid]


ClockMark: TypeAlias = tuple[float, float]
"""A moment of the wall clock, and the pool time of it."""
APART = 60.0
"""Seconds by which they may differ until a mark is made."""
MARKS_KEPT = 64


class RunningTime:
    """How long the pool has run since a moment of the wall clock.

    - A mark is made when the wall clock and the pool's seconds begin to differ by more: after the pool was off, or when
      the clock was set. So a clock that is wrong for a while makes nothing old, and neither does time off.
    - What arrived before the first mark counts from there.
    """

    def __init__(self) -> None:
        self.marks: list[ClockMark] = []
        """In the order in which they were made."""
        self._now: ClockMark = (0.0, 0.0)

    def advance(self, now: float, pool_time: float) -> None:
        self._now = (now, pool_time)
        if not self.marks or abs((now - self.marks[-1][0]) - (pool_time - self.marks[-1][1])) > APART:
            self.marks = [*self.marks, self._now][-MARKS_KEPT:]

    def since(self, moment: float) -> float:
        """Seconds that the pool has run since then."""
        until = self._now[1]
        for at, pool_time in reversed(self.marks):
            if at <= moment:
                return self._now[1] - min(pool_time + moment - at, until)
            until = pool_time
        return self._now[1] - until

    def trust_clock(self) -> None:
        """The wall clock is right now, and the pool was off when it did not run: that counts as if it had run."""
        now, pool_time = self._now
        self.marks = [(0.0, pool_time - now)]

    def load(self, marks: Iterable[Iterable[float]]) -> None:
        self.marks = [(at, pool_time) for at, pool_time in marks]
