"""What is ready in a channel, oldest first, with a limit for each user if the pool has one.

With `by_user`, there is also a queue for each user, and a queue of the first key of each. A choice under a limit looks
at no more users than it chooses keys (and those that have no room), and at no more keys of each than it may choose. Its
cost does not depend on how many keys a user has waiting.

Groups have, besides, one bucket for each source and size: an exact batch is filled from the oldest few groups of each
bucket, however long the queue is.
"""

import heapq
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, TypeVar

from stepwell.pool.api.leasing import UserLimit
from stepwell.pool.state.queues import PrioritySet
from stepwell.pool.state.records import Group

K = TypeVar("K", bound=tuple[Any, ...])


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
