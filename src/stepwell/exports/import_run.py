"""An import: stored groups are sent to a running pool.

Invariants:
- A step is taken once, so a repeated import changes nothing.
- A trajectory that the pool knows is not registered again, so its newer state stays.
- A group has as many places as it has trajectories in the file, and is not mixed with another group of its prompt.
- Metadata that all steps of a trajectory share belongs to the trajectory; the rest belongs to the step. So does the
  outcome reward.
"""

import json
from collections import Counter
from collections.abc import AsyncIterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from stepwell.common.async_calls import retry_while_unavailable
from stepwell.errors import BadRequest, PoolUnavailable
from stepwell.exports.pool_transfer import ATTEMPTS, BACKOFF, TransferProgress, all_changes
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.client import PoolClient
from stepwell.steps.columns import Columns, stack, unpack
from stepwell.steps.groups import StepGroup, split_by_size
from stepwell.steps.returns import put_together, take_apart
from stepwell.steps.step import Json, JsonObject
from stepwell.steps.trainable import fault_kind, step_fault

MESSAGE_BYTES = 2**23
"""Bytes sent at once."""


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
