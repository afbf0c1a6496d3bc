"""Groups out of a running pool: first a list of what is there, then the steps, page by page.

What always holds: reading changes nothing, and no page asks a shard for much at once, so that training goes on; of what
is not yet read, only names are in memory. A shard that restarts is waited for; what leaves the pool before its turn is
counted. Groups come oldest first within a shard, their trajectories by uid: an order that an import keeps.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from stepwell.common.retry import Backoff, retry_while_unavailable
from stepwell.errors import PoolUnavailable
from stepwell.exports.selection import Choice
from stepwell.pool.api.ports import PoolReader
from stepwell.pool.api.watching import Cursor, TrajectorySnapshot
from stepwell.steps.columns import Columns, cut, pack, stack, unpack
from stepwell.steps.groups import StepGroup

TOKENS_A_PAGE = 500_000
TRAJECTORIES_A_PAGE = 512
ATTEMPTS = 6
BACKOFF = Backoff(first=2.0, longest=2.0)


@dataclass(slots=True)
class ListedGroup:
    prompt_uid: str
    channel: str
    source: str
    tokens: dict[str, int] = field(default_factory=dict)
    """By trajectory_uid, of all its steps together."""


class Listing:
    """What was chosen of a pool, by group."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int], ListedGroup] = {}
        self._place: dict[tuple[str, str], int] = {}
        """(shard, trajectory_uid) to the number of its group: a trajectory may change it."""

    def __len__(self) -> int:
        return len(self._place)

    def put(self, one: TrajectorySnapshot) -> None:
        self.take_out(one)
        listed = ListedGroup(one.prompt_uid, one.channel, one.source)
        self._groups.setdefault((one.shard, one.group), listed).tokens[one.trajectory_uid] = one.tokens
        self._place[one.shard, one.trajectory_uid] = one.group

    def take_out(self, one: TrajectorySnapshot) -> None:
        number = self._place.pop((one.shard, one.trajectory_uid), None)
        if number is not None:
            del self._groups[one.shard, number].tokens[one.trajectory_uid]

    def forget(self, shard: str) -> None:
        self._groups = {key: group for key, group in self._groups.items() if key[0] != shard}
        self._place = {key: number for key, number in self._place.items() if key[0] != shard}

    def pages(self) -> Iterator[list[ListedGroup]]:
        """Groups of one shard each, in order; a group is in one page."""
        for _, keys in groupby(sorted(self._groups), key=lambda key: key[0]):
            page: list[ListedGroup] = []
            tokens = trajectories = 0
            for key in keys:
                group = self._groups[key]
                page.append(group)
                tokens += sum(group.tokens.values())
                trajectories += len(group.tokens)
                if tokens >= TOKENS_A_PAGE or trajectories >= TRAJECTORIES_A_PAGE:
                    yield page
                    page, tokens, trajectories = [], 0, 0
            if page:
                yield page


async def list_pool(pool: PoolReader, choice: Choice) -> Listing:
    listing, cursors, more = Listing(), dict[str, Cursor](), True
    while more:
        changes = await pool.changes(cursors)
        for shard in changes.reset_shards:
            listing.forget(shard)
        for one in changes.snapshots:
            if choice.takes(one) and one.steps > one.quarantined:
                listing.put(one)
            else:
                listing.take_out(one)
        cursors, more = dict(changes.cursors), changes.more
    return listing


async def read_groups(pool: PoolReader, listing: Listing, backoff: Backoff = BACKOFF) -> AsyncIterator[StepGroup]:
    """What is still there of what is listed."""
    for page in listing.pages():
        names = [(uid, group.prompt_uid) for group in page for uid in group.tokens]
        columns = await retry_while_unavailable(partial(pool.read, names), PoolUnavailable, backoff, attempts=ATTEMPTS)
        found = _by_trajectory(columns)
        for group in page:
            parts = [found[uid] for uid in sorted(group.tokens) if uid in found]
            if parts:
                yield StepGroup(stack(parts), group.source, group.channel)


def _by_trajectory(columns: Columns) -> dict[str, Columns]:
    """Without what is quarantined."""
    if any(fault is not None for fault in columns.quarantine):
        columns = pack([step for step in unpack(columns, copy=False) if step.quarantine is None])
    runs = [(uid, len(list(run))) for uid, run in groupby(columns.trajectory_uids)]
    pieces = cut(columns, [size for _, size in runs])
    return {uid: piece for (uid, _), piece in zip(runs, pieces, strict=True)}
