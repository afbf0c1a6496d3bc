"""The ready groups of a channel, on one shelf for each source and size.

Why: to fill a batch exactly, it is enough to look at the oldest few of each shelf, however long the queue is.
"""

from collections.abc import Iterator

from stepwell.pool.state.priority_set import PrioritySet
from stepwell.pool.state.records import Group


class SizeBucket(PrioritySet[tuple[int, int]]):
    """Keys of groups of one source and size, the oldest at hand."""

    def __init__(self, source: str, size: int) -> None:
        super().__init__()
        self.source = source
        self.size = size


class ReadyBySize:
    """A shelf is there while something is on it."""

    def __init__(self) -> None:
        self._shelves: dict[tuple[str, int], SizeBucket] = {}
        self._shelf_of: dict[int, SizeBucket] = {}
        """By the group's seq: its size may have changed since it was put there."""

    def __iter__(self) -> Iterator[SizeBucket]:
        """As of now, whatever is put or removed meanwhile."""
        return iter(list(self._shelves.values()))

    def put(self, group: Group) -> None:
        shelf = self._shelf_of.get(group.seq)
        if shelf is not None:
            if shelf.size == group.size:
                return
            self.remove(group)
        label = (group.source, group.size)
        shelf = self._shelves.get(label)
        if shelf is None:
            shelf = self._shelves[label] = SizeBucket(*label)
        shelf.add(group.key)
        self._shelf_of[group.seq] = shelf

    def remove(self, group: Group) -> None:
        shelf = self._shelf_of.pop(group.seq, None)
        if shelf is None:
            return
        shelf.discard(group.key)
        if not shelf:
            del self._shelves[shelf.source, shelf.size]

    def counts(self) -> dict[str, dict[int, int]]:
        """How many groups there are of each source, by size."""
        counts: dict[str, dict[int, int]] = {}
        for shelf in self._shelves.values():
            counts.setdefault(shelf.source, {})[shelf.size] = len(shelf)
        return counts
