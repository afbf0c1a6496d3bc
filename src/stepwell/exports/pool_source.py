"""Groups from a running pool: first a list of the selected trajectories, then their steps, page by page.

Invariants:
- Reading changes nothing. A page asks a shard for little at once, so training continues.
- Memory holds only the names of what is not yet read.
- A shard that restarts is awaited. Trajectories that leave the pool before they are read are left out.
- Groups come oldest first within a shard, and their trajectories by uid. An import keeps this order.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from stepwell.common.async_calls import Backoff, retry_while_unavailable
from stepwell.errors import PoolUnavailable
from stepwell.exports.selection import Selection
from stepwell.pool.api.sessions import may_keep
from stepwell.pool.api.watching import Changes, Cursor, TrajectorySnapshot
from stepwell.pool.client import PoolClient
from stepwell.steps.columns import Columns, pack, stack, unpack
from stepwell.steps.groups import StepGroup

PAGE_TOKENS = 500_000
PAGE_TRAJECTORIES = 512
ATTEMPTS = 6
BACKOFF = Backoff(first=2.0, longest=2.0)


@dataclass(slots=True)
class ListedGroup:
    prompt_uid: str
    channel: str
    source: str
    tokens: dict[str, int] = field(default_factory=dict)
    """The tokens of all steps, by trajectory_uid."""


class PoolListing:
    """The selected trajectories of a pool, by group."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int], ListedGroup] = {}
        self._group_of: dict[tuple[str, str], int] = {}
        """(shard, trajectory_uid) to the number of its group. A trajectory may move to another group."""

    def __len__(self) -> int:
        return len(self._group_of)

    def add(self, one: TrajectorySnapshot) -> None:
        self.remove(one)
        listed = ListedGroup(one.prompt_uid, one.channel, one.source)
        self._groups.setdefault((one.shard, one.group), listed).tokens[one.trajectory_uid] = one.tokens
        self._group_of[one.shard, one.trajectory_uid] = one.group

    def remove(self, one: TrajectorySnapshot) -> None:
        number = self._group_of.pop((one.shard, one.trajectory_uid), None)
        if number is not None:
            del self._groups[one.shard, number].tokens[one.trajectory_uid]

    def drop(self, shard: str) -> None:
        self._groups = {key: group for key, group in self._groups.items() if key[0] != shard}
        self._group_of = {key: number for key, number in self._group_of.items() if key[0] != shard}

    def pages(self, max_trajectories: int = PAGE_TRAJECTORIES) -> Iterator[list[ListedGroup]]:
        """Pages of groups of one shard, in order. A group is in one page."""
        for _, keys in groupby(sorted(self._groups), key=lambda key: key[0]):
            page: list[ListedGroup] = []
            tokens = trajectories = 0
            for key in keys:
                group = self._groups[key]
                page.append(group)
                tokens += sum(group.tokens.values())
                trajectories += len(group.tokens)
                if tokens >= PAGE_TOKENS or trajectories >= max_trajectories:
                    yield page
                    page, tokens, trajectories = [], 0, 0
            if page:
                yield page


async def all_changes(pool: PoolClient, backoff: Backoff = BACKOFF) -> AsyncIterator[Changes]:
    """Everything that the pool lists, page by page. PoolUnavailable if a shard does not answer: a part is not all."""
    cursors, more = dict[str, Cursor](), True
    while more:
        ask = partial(_changes_of_all, pool, cursors)
        changes = await retry_while_unavailable(ask, PoolUnavailable, backoff, attempts=ATTEMPTS)
        yield changes
        cursors, more = dict(changes.cursors), changes.more


async def _changes_of_all(pool: PoolClient, cursors: dict[str, Cursor]) -> Changes:
    changes = await pool.changes(cursors)
    if changes.missing:
        raise PoolUnavailable(f"no answer from {', '.join(changes.missing)}; nothing can be listed without them")
    return changes


async def list_pool(pool: PoolClient, selection: Selection) -> PoolListing:
    listing = PoolListing()
    async for changes in all_changes(pool):
        for shard in changes.reset_shards:
            listing.drop(shard)
        for one in changes.snapshots:
            if selection.accepts(one) and one.steps > one.quarantined:
                listing.add(one)
            else:
                listing.remove(one)
    return listing


async def read_groups(
    pool: PoolClient,
    listing: PoolListing,
    backoff: Backoff = BACKOFF,
    max_trajectories: int = PAGE_TRAJECTORIES,
) -> AsyncIterator[StepGroup]:
    """The listed groups that are still in the pool, without what is not to be kept."""
    for page in listing.pages(max_trajectories):
        names = [(uid, group.prompt_uid) for group in page for uid in group.tokens]
        columns = await retry_while_unavailable(partial(pool.read, names), PoolUnavailable, backoff, attempts=ATTEMPTS)
        found = _by_trajectory(columns)
        for group in page:
            parts = [found[uid] for uid in sorted(group.tokens) if uid in found and may_keep(found[uid].metadata[0])]
            if parts:
                yield StepGroup(stack(parts), group.source, group.channel)


def _by_trajectory(columns: Columns) -> dict[str, Columns]:
    """The columns of each trajectory, without quarantined steps."""
    if any(fault is not None for fault in columns.quarantine):
        columns = pack([step for step in unpack(columns, copy=False) if step.quarantine is None])
    return {found.trajectory_uids[0]: found for found in StepGroup(columns).trajectories()}
