"""A set that gives its smallest members quickly."""

import heapq
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=tuple[Any, ...])

SLACK = 64


class PrioritySet(Generic[K]):
    """Members come out smallest first. Any member can be discarded. Memory follows the number of members.

    It is a heap beside a set. A discarded member stays in the heap until it comes up, or until more than half of the
    heap is discarded members and the heap is rebuilt. Every operation costs O(log n), amortized.
    """

    __slots__ = ("_heap", "_members")

    def __init__(self) -> None:
        self._members: set[K] = set()
        self._heap: list[K] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, key: K) -> bool:
        return key in self._members

    def __iter__(self) -> Iterator[K]:
        """In no particular order."""
        return iter(self._members)

    def add(self, key: K) -> None:
        if key not in self._members:
            self._members.add(key)
            heapq.heappush(self._heap, key)

    def discard(self, key: K) -> None:
        self._members.discard(key)
        if len(self._heap) > 2 * len(self._members) + SLACK:
            self._heap = list(self._members)
            heapq.heapify(self._heap)

    def first(self) -> K | None:
        while self._heap and self._heap[0] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def smallest(self, count: int) -> list[K]:
        """The `count` smallest, in order; fewer if there are fewer."""
        found: list[K] = []
        while len(found) < count and self.first() is not None:
            key = heapq.heappop(self._heap)
            if not found or key != found[-1]:  # a member that was discarded and added again is in the heap twice
                found.append(key)
        for key in found:
            heapq.heappush(self._heap, key)
        return found
