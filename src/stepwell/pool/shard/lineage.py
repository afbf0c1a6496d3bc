"""Lineage: which batches were handed out before a version of the policy, and what was in them.

- A row for each trajectory of an acknowledged batch, and one for each version that the pool was told. They are in the
  journal until they are in files of the archive, beside the groups.
- Trajectories are named by hashes. So a lineage stays true when the data of a subject is removed, and tells nothing of
  it.
- A batch that was handed out under version p is in the first version after p, and in those that come from it.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from stepwell.pool.api.leasing import batch_of_lease, decision_of
from stepwell.pool.state.records import Lease, Trajectory
from stepwell.pool.state.shipment import ShippedRow, group_rows, ship, step_rows
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.groups import lineage_name, trajectory_digests
from stepwell.steps.trainable import StepFilter

if TYPE_CHECKING:
    import pyarrow

FOLDER = "_lineage"
"""A folder of the archive. Parquet readers skip names that begin with an underscore."""
FOUND = ("version", "batch", "trajectory")


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageRow:
    version: int
    """That the pool served when the batch was handed out; in a row without a batch, one that it was told."""
    at: float
    """When the batch was acknowledged, or the version was set, in seconds of the wall clock."""
    batch: str = ""
    channel: str = ""
    group: int = 0
    """Its number in the shard."""
    trajectory: str = ""
    """The hash of its uid."""
    rows: int = 0
    """Steps that the trainer got."""
    tokens: int = 0
    """Their response tokens."""
    trajectory_return: float | None = None
    digest: str = ""
    """Of the steps that the trainer got; empty if it got single steps."""
    min_exactness: str = ""
    untrainable: bool = False
    models: str = ""
    """The filter by which steps were left out. Models are separated by commas."""


def lineage_of(lease: Lease, at: float) -> Iterator[LineageRow]:
    """Of an acknowledged lease, while its groups still have their steps."""
    step_filter = lease.step_filter
    for group in lease.groups:
        rows = group_rows(group, step_filter.accepts)
        digests = trajectory_digests(ship(rows))
        for trajectory in group.trajectories.values():
            digest = digests.get(trajectory.uid, "")
            yield _row(lease, at, trajectory, _steps_of(rows, trajectory), digest)
    rows = step_rows(lease.steps, step_filter.accepts)
    for trajectory in {id(row.trajectory): row.trajectory for row in rows}.values():
        yield _row(lease, at, trajectory, _steps_of(rows, trajectory), "")


def versions_with(
    names: Collection[str], rows: Iterable[LineageRow], tables: "Iterable[pyarrow.Table]"
) -> tuple[list[int], list[int]]:
    """Under which versions batches with these trajectories were handed out, and all versions that the pool was told."""
    under, told = set[int](), set[int]()
    archived = (zip(*(table[name].to_pylist() for name in FOUND), strict=True) for table in tables)
    for version, batch, trajectory in chain(((row.version, row.batch, row.trajectory) for row in rows), *archived):
        if not batch:
            told.add(version)
        elif trajectory in names:
            under.add(version)
    return sorted(under), sorted(told)


def lineage_table(rows: Sequence[LineageRow]) -> "pyarrow.Table":
    import pyarrow as pa

    types: dict[str, Any] = {
        **dict.fromkeys(("version", "group", "rows", "tokens"), pa.int64()),
        **dict.fromkeys(("at", "trajectory_return"), pa.float64()),
        **dict.fromkeys(("batch", "channel", "trajectory", "digest", "min_exactness", "models"), pa.string()),
        "untrainable": pa.bool_(),
    }
    dicts = [asdict(row) for row in rows]
    return pa.table({name: pa.array([row[name] for row in dicts], kind) for name, kind in types.items()})


def _row(lease: Lease, at: float, trajectory: Trajectory, steps: Sequence[StoredStep], digest: str) -> LineageRow:
    return LineageRow(
        version=lease.version,
        at=at,
        batch=batch_of_lease(lease.uid) if decision_of(lease.uid) else lease.uid,
        channel=lease.channel,
        group=trajectory.group.seq,
        trajectory=lineage_name(trajectory.uid),
        rows=len(steps),
        tokens=sum(step.response_length for step in steps),
        trajectory_return=trajectory.total_return(),
        digest=digest,
        **_filter(lease.step_filter),
    )


def _filter(step_filter: StepFilter) -> dict[str, Any]:
    return {
        "min_exactness": step_filter.min_exactness.value,
        "untrainable": step_filter.untrainable,
        "models": ",".join(step_filter.models),
    }


def _steps_of(rows: Sequence[ShippedRow], trajectory: Trajectory) -> list[StoredStep]:
    return [row.step for row in rows if row.trajectory is trajectory]
