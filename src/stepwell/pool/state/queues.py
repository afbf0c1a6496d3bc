"""The orders of a channel: sets that give their smallest members, what is ready, and who holds how much.

- A choice under a limit for each user looks at no more users than it chooses keys (and those that have no room), and at
  no more keys of each than it may choose. Its cost does not depend on how many keys a user has waiting.
- An exact batch is filled from the oldest few groups of each source and size, however long the queue is.
- One producer cannot push out the data of the others: of those that hold much, the one that holds the most loses its
  oldest group. The cost of a step does not grow with what is held.
"""

import heapq
from collections.abc import Iterable, Iterator
from itertools import chain
from math import inf
from typing import Any, Generic, TypeVar

from stepwell.pool.api.leasing import UserLimit
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.sessions import subjects_of
from stepwell.pool.state.records import Group
from stepwell.steps.step import JsonObject

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


class ReadyQueue(PrioritySet[K]):
    def __init__(self, *, by_user: bool = False) -> None:
        super().__init__()
        self.changes = 0
        """How many keys have come and gone so far."""
        self._by_user = by_user
        self._user_of: dict[K, str] = {}
        self._of_nobody: PrioritySet[K] = PrioritySet()
        self._of_user: dict[str, PrioritySet[K]] = {}
        """No queue is empty."""
        self._heads: PrioritySet[K] = PrioritySet()
        """The first key of each user."""

    def add(self, key: K, user: str = "") -> None:
        if self._by_user and (key not in self or self._user_of.get(key, "") != user):
            self._leave_user(key)
            self._join_user(key, user)
        self.changes += key not in self
        super().add(key)

    def discard(self, key: K) -> None:
        if self._by_user:
            self._leave_user(key)
        self.changes += key in self
        super().discard(key)

    def oldest(self, count: int, limit: UserLimit | None = None) -> list[K]:
        """The `count` smallest keys that the limit allows, in order; fewer if there are fewer."""
        if limit is None:
            return self.smallest(count)
        queues = ((self._of_user[user], limit.room(user)) for user in self._users_to_look_at(count, limit))
        of_users = chain.from_iterable(queue.smallest(min(count, room)) for queue, room in queues if room > 0)
        return heapq.nsmallest(count, chain(self._of_nobody.smallest(count), of_users))

    def user_of(self, key: K) -> str:
        """Empty if there is none, or if users are not told apart."""
        return self._user_of.get(key, "")

    def held_back(self, limit: UserLimit) -> dict[str, int]:
        """How many keys of each user are more than the limit allows."""
        more = {user: len(queue) - limit.room(user) for user, queue in self._of_user.items()}
        return {user: count for user, count in more.items() if count > 0}

    def _users_to_look_at(self, count: int, limit: UserLimit) -> Iterable[str]:
        """A user with room whose first key is not among the first `count` of such users comes after all of those."""
        if limit.most == 0:
            return [user for user in limit.rooms if user in self._of_user]
        without_room = sum(room == 0 for room in limit.rooms.values())
        return [self._user_of[key] for key in self._heads.smallest(count + without_room)]

    def _join_user(self, key: K, user: str) -> None:
        if not user:
            self._of_nobody.add(key)
            return
        queue = self._of_user.setdefault(user, PrioritySet())
        head = queue.first()
        queue.add(key)
        self._user_of[key] = user
        self._replace_head(head, queue)

    def _leave_user(self, key: K) -> None:
        self._of_nobody.discard(key)
        user = self._user_of.pop(key, None)
        if user is None:
            return
        queue = self._of_user[user]
        head = queue.first()
        queue.discard(key)
        self._replace_head(head, queue)
        if not queue:
            del self._of_user[user]

    def _replace_head(self, before: K | None, queue: PrioritySet[K]) -> None:
        head = queue.first()
        if head == before:
            return
        if before is not None:
            self._heads.discard(before)
        if head is not None:
            self._heads.add(head)


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


LARGE = 1 / 16
"""Producers that hold less than this part of a limit are alike: among them only age counts, not the length of what they
send."""


def producer_of(metadata: JsonObject, source: str) -> str:
    """Returns the producer of a group whose first trajectory has this metadata; empty if it is nobody's."""
    person = next(iter(subjects_of(metadata)), "")
    return f"user {person}" if person else f"source {source}" if source else ""


class ProducerShare:
    __slots__ = ("groups", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self.groups: PrioritySet[tuple[int, int]] = PrioritySet()
        """Never empty."""


class ProducerShares:
    def __init__(self, limits: Limits) -> None:
        self._large_bytes = inf if limits.max_bytes is None else limits.max_bytes * LARGE
        self._large_groups = limits.max_queue_size * LARGE
        self._shares: dict[str, ProducerShare] = {}
        """By producer. A group of nobody is its own share, and is not here."""
        self._large: dict[str | int, ProducerShare | Group] = {}
        """By producer; by the number of the group where it is nobody's."""

    def add(self, group: Group) -> None:
        share = self._shares.get(group.producer)
        if share is None and group.producer:
            share = self._shares[group.producer] = ProducerShare()
        if share is not None:
            share.groups.add(group.key)
            share.nbytes += group.nbytes
        self._judge(group, share or group)

    def remove(self, group: Group) -> None:
        share = self._shares.get(group.producer)
        if share is None:
            self._large.pop(group.seq, None)
            return
        share.groups.discard(group.key)
        share.nbytes -= group.nbytes
        if not share.groups:
            del self._shares[group.producer]
        self._judge(group, share)

    def grow(self, group: Group, nbytes: int) -> None:
        """The group has so many bytes more, or less."""
        share = self._shares.get(group.producer)
        if share is not None:
            share.nbytes += nbytes
        if (share or group).nbytes > self._large_bytes or nbytes < 0:
            self._judge(group, share or group)

    def oldest_by_bytes(self) -> tuple[int, int] | None:
        """The oldest group of the large producer that holds the most bytes; of several, the oldest of all. None if no
        producer is large."""
        sized = [(-share.nbytes, _oldest(share)) for share in self._large.values()]
        return min(sized)[1] if sized and -min(sized)[0] > self._large_bytes else None

    def oldest_by_groups(self) -> tuple[int, int] | None:
        """The same of the one that holds the most groups."""
        sized = [(-_count(share), _oldest(share)) for share in self._large.values()]
        return min(sized)[1] if sized and -min(sized)[0] > self._large_groups else None

    def _judge(self, group: Group, share: ProducerShare | Group) -> None:
        if share.nbytes > self._large_bytes or _count(share) > self._large_groups:
            self._large[group.producer or group.seq] = share
        else:
            self._large.pop(group.producer or group.seq, None)


def _count(share: ProducerShare | Group) -> int:
    return 1 if isinstance(share, Group) else len(share.groups)


def _oldest(share: ProducerShare | Group) -> tuple[int, int] | None:
    return share.key if isinstance(share, Group) else share.groups.first()
