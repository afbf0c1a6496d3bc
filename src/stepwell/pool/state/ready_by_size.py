"""The ready groups of a channel, in one bucket for each source and size.

An exact batch is filled from the oldest few groups of each bucket, however long the queue is.
"""

from collections.abc import Iterator

from stepwell.pool.state.ready_queue import ReadyQueue
from stepwell.pool.state.records import Group


class SizeBucket(ReadyQueue[tuple[int, int]]):
    """Keys of the ready groups of one source and size."""

    def __init__(self, source: str, size: int, *, by_user: bool = False) -> None:
        super().__init__(by_user=by_user)
        self.source = source
        self.size = size


class ReadyBySize:
    """An empty bucket is deleted."""

    def __init__(self, *, by_user: bool = False) -> None:
        self._by_user = by_user
        self._buckets: dict[tuple[str, int], SizeBucket] = {}
        self._bucket_of: dict[int, SizeBucket] = {}
        """By the group's seq. The group's size may have changed since it was added."""

    def __iter__(self) -> Iterator[SizeBucket]:
        """The buckets of this moment. Groups may be added or removed during the iteration."""
        return iter(list(self._buckets.values()))

    def add(self, group: Group, user: str = "") -> None:
        bucket = self._bucket_of.get(group.seq)
        if bucket is not None:
            if bucket.size == group.size:
                return
            self.remove(group)
        label = (group.source, group.size)
        bucket = self._buckets.get(label)
        if bucket is None:
            bucket = self._buckets[label] = SizeBucket(*label, by_user=self._by_user)
        bucket.add(group.key, user)
        self._bucket_of[group.seq] = bucket

    def remove(self, group: Group) -> None:
        bucket = self._bucket_of.pop(group.seq, None)
        if bucket is None:
            return
        bucket.discard(group.key)
        if not bucket:
            del self._buckets[bucket.source, bucket.size]

    def counts(self) -> dict[str, dict[int, int]]:
        """Number of groups, by source and by size."""
        counts: dict[str, dict[int, int]] = {}
        for bucket in self._buckets.values():
            counts.setdefault(bucket.source, {})[bucket.size] = len(bucket)
        return counts
