"""`stepwell lineage`: what made a version of the policy, and where a trajectory went. It reads the archive alone."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Self

from pydantic import Field, model_validator

from stepwell.commands.sections import Section
from stepwell.common.command_line import say
from stepwell.errors import BadRequest, Conflict
from stepwell.exports.lineage import ArchivedLineage, LineageEntry, digest_of


class LineageSettings(Section, env_prefix="STEPWELL_LINEAGE_"):
    """Show what a version of the policy was trained on, or which versions a trajectory is in, from an archive.

    Trajectories are named by hashes of their uids.
    """

    examples = ("stepwell lineage --archive archive --version 42 --verify",)

    archive: str
    """The archive of the pool: a folder or fsspec URL."""
    version: int | None = None
    """Show the batches that this version of the policy was made from."""
    trajectory: str | None = None
    """Show the batches and versions that this trajectory is in, by its uid or the hash of it."""
    verify: bool = False
    """Rebuild these batches from the archive too, and compare their hashes. It fails if one differs."""
    as_json: bool = Field(default=False, alias="json")
    """Print it as JSON."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.version is None) == (self.trajectory is None):
            raise ValueError("name --version or --trajectory, one of them")
        return self


def run_lineage(settings: LineageSettings) -> None:
    lineage = ArchivedLineage(settings.archive)
    if settings.version is not None:
        entries, what = lineage.of_version(settings.version), f"version {settings.version}"
    else:
        entries, what = lineage.of_trajectory(settings.trajectory or ""), f"trajectory {settings.trajectory}"
    if not entries:
        raise BadRequest(f"the lineage of {settings.archive} has no {what}")
    say(_as_json(entries) if settings.as_json else "\n".join(lineage_lines(entries)))
    if settings.verify:
        for line in verify(lineage, entries):
            say(line)


def lineage_lines(entries: Sequence[LineageEntry]) -> Iterator[str]:
    for batch in dict.fromkeys(entry.batch for entry in entries):
        members = [entry for entry in entries if entry.batch == batch]
        rows, tokens = sum(entry.rows for entry in members), sum(entry.tokens for entry in members)
        trajectories = f"{len(members)} trajectories, {rows} rows, {tokens} tokens"
        yield f"version {members[0].version} · batch {batch} · {trajectories}"
        for entry in members:
            advantage = "no reward" if math.isnan(entry.advantage) else f"advantage {entry.advantage:+.3f}"
            yield f"  {entry.trajectory} · {advantage} · {entry.rows} rows · {entry.tokens} tokens"


def verify(lineage: ArchivedLineage, entries: Sequence[LineageEntry]) -> Iterator[str]:
    """Conflict if a batch of the archive is not what was trained: some of it was deleted, or is not archived yet."""
    for batch in dict.fromkeys(entry.batch for entry in entries if entry.digest):
        recorded, rebuilt = lineage.recorded_digest(batch), digest_of(lineage.rebuild(batch))
        if recorded != rebuilt:
            raise Conflict(
                f"batch {batch} in the archive has hash {rebuilt}, and what was trained has {recorded}: some of it was "
                "deleted, or is not in the archive yet"
            )
        yield f"batch {batch} is rebuilt from the archive bit for bit: {rebuilt}"


def _as_json(entries: Sequence[LineageEntry]) -> str:
    return json.dumps(
        [{**asdict(entry), "advantage": None if math.isnan(entry.advantage) else entry.advantage} for entry in entries],
        indent=2,
    )
