"""Where a thing goes, decided from its name alone, so that every process decides alike."""

from collections.abc import Sequence
from typing import Generic, TypeVar
from zlib import crc32

T = TypeVar("T")


def shard_of(prompt_uid: str, shards: int) -> int:
    """The shard that owns a group. The same in every process and on every day (unlike Python's own hash)."""
    return crc32(prompt_uid.encode()) % shards


class RoundRobin(Generic[T]):
    """Gives each of its items in turn."""

    def __init__(self, items: Sequence[T]) -> None:
        if not items:
            raise ValueError("nothing to take turns")
        self._items = tuple(items)
        self._next = 0

    def order(self) -> tuple[T, ...]:
        """All items, the one whose turn it is first: the rest are there to fall back on."""
        start = self._next
        self._next = (start + 1) % len(self._items)
        return self._items[start:] + self._items[:start]
