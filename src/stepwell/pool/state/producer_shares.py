"""Who holds how much of a channel, so that one producer cannot push out the data of the others.

- The producer of a group is the user of its session, else the subject that its metadata names, else its source. A group
  of nobody is a producer of its own.
- A producer is large if it holds more than LARGE of a limit. Few can be, so the largest is found among few.
- The cost of a step does not grow with what is held.
"""

from math import inf

from stepwell.pool.api.plan import Limits
from stepwell.pool.api.sessions import subjects_of
from stepwell.pool.state.queues import PrioritySet
from stepwell.pool.state.records import Group
from stepwell.steps.step import JsonObject

LARGE = 1 / 16
"""Producers that hold less than this part of a limit are alike: among them only age counts, not the length of what they
send."""


def producer_of(metadata: JsonObject, source: str) -> str:
    """Of a group whose first trajectory has this metadata; empty if it is nobody's."""
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
