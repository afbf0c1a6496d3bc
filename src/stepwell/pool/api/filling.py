"""Batches that are filled to an exact number of trajectories, from whole groups of several sources."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stepwell.pool.api.leasing import Taken
from stepwell.steps.columns import Columns, cut, stack


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Filled:
    """What a fill gives: groups, oldest first."""

    columns: Columns
    group_sizes: list[int]
    """Steps in each group."""
    sources: list[str]
    """Where each group comes from."""
    opened_at: list[float]
    attempts: list[int]
    """How often each was handed out before."""
    leases: tuple[tuple[str, str], ...]
    """(shard, lease) of every part: what an acknowledgement names."""


def as_filled(taken: Taken, leases: tuple[tuple[str, str], ...]) -> Filled:
    return Filled(
        columns=taken.columns,
        group_sizes=taken.group_sizes,
        sources=taken.sources,
        opened_at=taken.opened_at,
        attempts=taken.attempts,
        leases=leases,
    )


def merge_filled(parts: Sequence[Filled]) -> Filled:
    """One of all, oldest first. A single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    opened_at = [at for part in parts for at in part.opened_at]
    order = sorted(range(len(opened_at)), key=opened_at.__getitem__)
    groups = [group for part in parts for group in cut(part.columns, part.group_sizes)]
    sizes = [size for part in parts for size in part.group_sizes]
    sources = [source for part in parts for source in part.sources]
    attempts = [attempt for part in parts for attempt in part.attempts]
    return Filled(
        columns=stack([groups[g] for g in order]),
        group_sizes=[sizes[g] for g in order],
        sources=[sources[g] for g in order],
        opened_at=[opened_at[g] for g in order],
        attempts=[attempts[g] for g in order],
        leases=tuple(lease for part in parts for lease in part.leases),
    )


@dataclass(frozen=True, slots=True)
class Backlog:
    """The ready groups of a channel."""

    groups: Mapping[str, Mapping[int, int]]
    """How many there are of each source, by size: the number of trajectories in them."""

    @property
    def total_groups(self) -> int:
        return sum(map(self.groups_of, self.groups))

    @property
    def total_trajectories(self) -> int:
        return sum(map(self.trajectories_of, self.groups))

    @property
    def largest(self) -> int:
        """The size of the largest; 0 if there is none."""
        return max((size for sizes in self.groups.values() for size in sizes), default=0)

    def groups_of(self, source: str) -> int:
        return sum(self.groups.get(source, {}).values())

    def trajectories_of(self, source: str) -> int:
        return sum(size * count for size, count in self.groups.get(source, {}).items())


def merge_backlogs(parts: Iterable[Backlog]) -> Backlog:
    groups: dict[str, Counter[int]] = {}
    for part in parts:
        for source, sizes in part.groups.items():
            groups.setdefault(source, Counter()).update(sizes)
    return Backlog(groups)
