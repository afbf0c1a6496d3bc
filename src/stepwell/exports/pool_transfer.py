"""Groups from a running pool, and stored groups into one.

- Reading changes nothing. A page asks a shard for little at once, so training continues. Memory holds only the names of
  what is not yet read.
- A shard that restarts is awaited. Trajectories that leave the pool before they are read are left out.
- Groups come oldest first within a shard, and their trajectories by uid. An import keeps this order.
- A step is imported once, so a repeated import changes nothing. A trajectory that the pool knows is not registered
  again, so its newer state stays.
- An imported group has as many places as it has trajectories in the file, and is not mixed with another group of its
  prompt.
- Metadata that all steps of a trajectory share belongs to the trajectory; the rest belongs to the step. So does the
  outcome reward.
"""

import json
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import TextIO

from stepwell.common.async_calls import Backoff, retry_while_unavailable
from stepwell.common.command_line import ProgressLine
from stepwell.errors import BadRequest, PoolUnavailable
from stepwell.exports.selection import Selection
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.api.sessions import may_keep
from stepwell.pool.api.watching import Changes, Cursor, TrajectorySnapshot
from stepwell.pool.client import PoolClient
from stepwell.steps.columns import Columns, pack, stack, unpack
from stepwell.steps.groups import StepGroup, split_by_size
from stepwell.steps.returns import put_together, take_apart
from stepwell.steps.step import Json, JsonObject
from stepwell.steps.trainable import fault_kind, step_fault

PAGE_TOKENS = 500_000
PAGE_TRAJECTORIES = 512
ATTEMPTS = 6
BACKOFF = Backoff(first=2.0, longest=2.0)

MESSAGE_BYTES = 2**23
"""Bytes sent at once."""


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


class TransferProgress:
    def __init__(
        self, total: int | None = None, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`total` is the number of trajectories, if it is known."""
        self.trajectories = self.steps = self.nbytes = 0
        self._total, self._clock, self._started = total, clock, clock()
        self._line = ProgressLine(self.text, out, clock)

    def add(self, page: Sequence[StepGroup], nbytes: int) -> None:
        """Count more groups; `nbytes` is the total of all so far."""
        self.trajectories += sum(group.count() for group in page)
        self.steps += sum(len(group.columns) for group in page)
        self.nbytes = nbytes
        self._line.update()

    def text(self) -> str:
        seconds = max(self._clock() - self._started, 1e-3)
        total = "" if self._total is None else f" of {self._total:,}"
        amount = f"{self.trajectories:,}{total} trajectories, {self.steps:,} steps, {self.nbytes / 1e6:,.1f} MB"
        return f"{amount} in {seconds:.1f} s ({self.steps / seconds:,.0f} steps/s)"

    def close(self) -> str:
        """Clear the line and return the final text."""
        self._line.clear()
        self._total = None
        return self.text()


@dataclass(slots=True)
class ImportReport:
    """The counts of an import's steps by what happened to them."""

    verdicts: Counter[SubmitVerdict] = field(default_factory=Counter)
    unsound: Counter[str] = field(default_factory=Counter)
    """Trajectories that were not sent, by the fault of one of their steps."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Steps that the pool dropped during the import, imported ones and others, by cause."""

    def text(self) -> str:
        parts = [f"{count:,} {verdict}" for verdict, count in sorted(self.verdicts.items())]
        parts += [f"{count:,} trajectories unsound ({kind})" for kind, count in sorted(self.unsound.items())]
        return ", ".join(parts) or "there was nothing to import"


async def import_groups(
    pool: PoolClient,
    groups: AsyncIterable[StepGroup],
    channel: str | None,
    progress: TransferProgress,
    message_bytes: int = MESSAGE_BYTES,
) -> ImportReport:
    report = ImportReport()
    known, dropped = await _known(pool), await _dropped(pool)
    nbytes = 0
    async for page in split_by_size(groups, message_bytes):
        sound = [found for group in page if (found := _sound(group, report.unsound)) is not None]
        if sound:
            columns, registrations = message(sound, known, channel)
            submit = partial(pool.submit_columns, columns, registrations)
            report.verdicts.update(await retry_while_unavailable(submit, PoolUnavailable, BACKOFF, attempts=ATTEMPTS))
        nbytes += sum(group.nbytes for group in page)
        progress.add(page, nbytes)
    report.dropped = {cause: count - dropped[cause] for cause, count in (await _dropped(pool)).items()}
    return report


def message(
    groups: Sequence[StepGroup], known: set[tuple[str, str]], channel: str | None
) -> tuple[Columns, list[Registration]]:
    """The message for these groups. Adds their trajectories to `known`."""
    parts: list[Columns] = []
    registrations: list[Registration] = []
    for group in groups:
        new: list[Registration] = []
        for columns in group.trajectories():
            common, rewards = common_metadata(columns.metadata), take_apart(columns)
            outcome, rewards.outcome = rewards.outcome, None
            own = replace(columns, metadata=[_without(found, common) for found in columns.metadata])
            parts.append(put_together(own, rewards))
            name = columns.trajectory_uids[0], columns.prompt_uids[0]
            if name not in known:
                known.add(name)
                new.append(Registration(*name, channel or _channel_of(group), None, common, group.source, outcome))
        registrations += [replace(wanted, group_size=len(new)) for wanted in new]
    return stack(parts), registrations


def common_metadata(all_S: Sequence[JsonObject]) -> dict[str, Json]:
    """The items that all steps share."""
    first, *others = all_S
    return {key: value for key, value in first.items() if all(_has(other, key, value) for other in others)}


def _has(found: JsonObject, key: str, value: Json) -> bool:
    """Compared as JSON, where 1, 1.0 and true differ."""
    return key in found and (found[key] is value or json.dumps(found[key]) == json.dumps(value))


def _without(found: JsonObject, common: Mapping[str, Json]) -> JsonObject:
    return {key: value for key, value in found.items() if key not in common}


def _channel_of(group: StepGroup) -> str:
    if not group.channel:
        raise BadRequest("the file does not name the channel of its groups, as an archive does not: give --channel")
    return group.channel


def _sound(group: StepGroup, faults: Counter[str]) -> StepGroup | None:
    """The group without the trajectories that have an unsound step; None if none is left."""
    steps = unpack(group.columns, copy=False)
    faulty = {step.trajectory_uid: fault for step in steps if (fault := step.quarantine or step_fault(step))}
    if not faulty:
        return group
    faults.update(map(fault_kind, faulty.values()))
    kept = [columns for columns in group.trajectories() if columns.trajectory_uids[0] not in faulty]
    return group.only(kept) if kept else None


async def _known(pool: PoolClient) -> set[tuple[str, str]]:
    """(trajectory_uid, prompt_uid) of all trajectories in the pool, and of the last that left it."""
    return {(one.trajectory_uid, one.prompt_uid) async for changes in all_changes(pool) for one in changes.snapshots}


async def _dropped(pool: PoolClient) -> Counter[str]:
    found: Counter[str] = Counter()
    for channel in (await pool.stats()).channels.values():
        found.update({cause: tally.steps for cause, tally in channel.dropped.items()})
    return found
