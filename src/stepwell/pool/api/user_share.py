"""How much of one batch may come from one user.

- The limit is floor(share × count), at least 1. What belongs to no user is not limited.
- A batch of several shards has one limit: each part is told how many of each user it may have.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

ROUNDING = 1e-9
"""0.29 × 100 is 28.999999999999996 as a float, and means 29."""


def max_per_user(share: float, count: int) -> int:
    return max(1, int(share * count + ROUNDING))


@dataclass(frozen=True, slots=True)
class UserLimit:
    most: int
    """How many of each user there may be."""
    rooms: Mapping[str, int] = field(default_factory=dict)
    """The same for single users, in place of `most`."""

    def room(self, user: str) -> int:
        return self.rooms.get(user, self.most)

    def less(self, users: Iterable[str]) -> "UserLimit":
        """What is left after one was taken of each of these. A user may be named several times."""
        taken = Counter(user for user in users if user)
        return UserLimit(self.most, {**self.rooms, **{u: max(0, self.room(u) - n) for u, n in taken.items()}})

    def more(self, users: Iterable[str]) -> "UserLimit":
        """One more for each of these. A user may be named several times."""
        extra = Counter(user for user in users if user)
        return UserLimit(self.most, {**self.rooms, **{user: self.room(user) + n for user, n in extra.items()}})

    def keep(self, items: Iterable[T], user_of: Callable[[T], str]) -> list[T]:
        """The first items of each user, as many as there may be."""
        seen: Counter[str] = Counter()
        kept: list[T] = []
        for item in items:
            user = user_of(item)
            seen[user] += 1
            if not user or seen[user] <= self.room(user):
                kept.append(item)
        return kept
