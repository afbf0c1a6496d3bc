"""Reads the lineage of an archive: what a version of the policy was trained on, and where a trajectory went.

- A batch belongs to the first version after the one under which it was handed out. Later versions come from that one.
- Advantages are those of GRPO, from the returns of the batch's groups. A trainer may use others.
- A batch is rebuilt from the archive with the filter by which its trainer got it, and its hash is compared.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepwell.common.imports import require
from stepwell.errors import BadRequest
from stepwell.exports.export_files import FileSource
from stepwell.steps.advantages import group_advantages
from stepwell.steps.arrow import EXTRA
from stepwell.steps.columns import Columns, pack, unpack
from stepwell.steps.groups import StepGroup, batch_digest, first_version, lineage_name, trajectory_digests
from stepwell.steps.step import Exactness, Step
from stepwell.steps.trainable import StepFilter

LINEAGE = "_lineage"
"""The folder of an archive's lineage."""


@dataclass(frozen=True, slots=True)
class LineageEntry:
    """A trajectory in a batch."""

    trajectory: str
    """The hash of its uid."""
    version: int
    """The first version of the policy that has it."""
    batch: str
    advantage: float
    """NaN without a reward."""
    rows: int
    tokens: int
    """The number of tokens of responses."""
    trajectory_return: float | None
    digest: str
    step_filter: StepFilter


class ArchivedLineage:
    def __init__(self, url: str) -> None:
        """BadRequest if the archive has none."""
        self._url = url
        fs, path = require("fsspec", EXTRA).core.url_to_fs(url)
        folder = f"{path}/{LINEAGE}"
        files = sorted(fs.ls(folder, detail=False)) if fs.isdir(folder) else []
        rows = [row for file in files if file.endswith(".parquet") for row in _read(fs, file)]
        if not rows:
            raise BadRequest(f"{url} has no lineage: a pool writes it there with --archive, within five minutes")
        self.versions = sorted({row["version"] for row in rows if not row["batch"]})
        """The versions that the pool was told."""
        self.entries = list(self._entries([row for row in rows if row["batch"]]))

    def of_version(self, version: int) -> list[LineageEntry]:
        return [entry for entry in self.entries if entry.version == version]

    def of_trajectory(self, trajectory_uid: str) -> list[LineageEntry]:
        name = lineage_name(trajectory_uid)
        return [entry for entry in self.entries if name in (entry.trajectory, trajectory_uid)]

    def recorded_digest(self, batch: str) -> str:
        return batch_digest(entry.digest for entry in self.entries if entry.batch == batch and entry.digest)

    def rebuild(self, batch: str) -> list[StepGroup]:
        """The groups of a batch, from the archive. What was deleted or is not archived yet is missing."""
        wanted = {entry.trajectory: entry for entry in self.entries if entry.batch == batch and entry.digest}
        if not wanted:
            raise BadRequest(f"no batch {batch!r} is in the lineage of {self._url}")
        found: list[StepGroup] = []
        for group in FileSource(self._url, late_rewards=False).groups():
            parts = [self._shipped(columns, wanted) for columns in group.trajectories()]
            if kept := [columns for columns in parts if columns is not None]:
                found.append(group.only(kept))
        return found

    def _shipped(self, columns: Columns, wanted: dict[str, LineageEntry]) -> Columns | None:
        """The steps of a trajectory that the trainer got; None if it did not get any."""
        entry = wanted.get(lineage_name(columns.trajectory_uids[0]))
        if entry is None:
            return None
        steps = [step for step in unpack(columns, copy=False) if _accepts(entry.step_filter, step)]
        return pack(steps) if steps else None

    def _entries(self, rows: Sequence[dict[str, Any]]) -> Iterator[LineageEntry]:
        groups: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            groups[row["batch"], row["file_shard"], row["group"]].append(row)
        for (batch, _, _), members in groups.items():
            returns = np.array([row["trajectory_return"] for row in members], np.float64)
            advantages = group_advantages(returns, np.zeros(len(members), np.int64))
            for row, advantage in zip(members, advantages.tolist(), strict=True):
                grade = Exactness(row["min_exactness"])
                models = tuple(filter(None, row["models"].split(",")))
                yield LineageEntry(
                    trajectory=row["trajectory"],
                    version=first_version(self.versions, row["version"]),
                    batch=batch,
                    advantage=advantage,
                    rows=row["rows"],
                    tokens=row["tokens"],
                    trajectory_return=row["trajectory_return"],
                    digest=row["digest"],
                    step_filter=StepFilter(grade, row["untrainable"], models),
                )


def digest_of(groups: Sequence[StepGroup]) -> str:
    return batch_digest(digest for group in groups for digest in trajectory_digests(group.columns).values())


def _accepts(step_filter: StepFilter, step: Step) -> bool:
    return step.quarantine is None and step_filter.rejection_kind(_Filtered(step)) is None


class _Filtered:
    """A step as a filter reads it."""

    def __init__(self, step: Step) -> None:
        self.exactness = step.exactness
        self.untrainable = step.untrainable
        self.model = step.model

    def is_held(self) -> bool:
        return True


def _read(fs: Any, file: str) -> Iterator[dict[str, Any]]:
    shard = file.rpartition("/")[2].rsplit("-", 2)[0]
    with fs.open(file, "rb") as source:
        for row in require("pyarrow.parquet", EXTRA).read_table(source).to_pylist():
            yield {**row, "file_shard": shard}
