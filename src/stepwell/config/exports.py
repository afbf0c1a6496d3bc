"""The settings of `stepwell export` and `stepwell import`."""

from datetime import datetime
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from stepwell.config.sections import PoolSection


class ExportSettings(PoolSection):
    """Write the steps of a running pool or of an archive to Parquet, JSONL or a dataset folder.

    An export changes nothing, and training continues. All given filters apply together.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_EXPORT_")

    to: str
    """Path or fsspec URL to write: x.parquet, x.jsonl, or a folder for a dataset. It must not exist yet."""
    from_: str | None = Field(default=None, alias="from")
    """Read this instead of a pool: an archive, an earlier export, or a folder or file of them."""
    format: Literal["parquet", "jsonl", "dataset"] | None = None
    """File format; without it, the path's suffix decides. A dataset is a folder with data/*.parquet."""
    shape: Literal["steps", "sft", "preferences"] = "steps"
    """steps: all columns, can be imported again. sft: one example per step. preferences: pairs within groups."""
    tokenizer_path: str | None = None
    """Folder or name of the Hugging Face tokenizer, for the texts of sft and preferences; without it, ids only."""
    best: int | None = Field(default=None, ge=1)
    """sft: take this number of trajectories from each group, those with the highest rewards."""
    margin: float = Field(default=0.0, ge=0)
    """preferences: the least difference between the two rewards of a pair; equal rewards make no pair."""
    channel: str | None = None
    """Only this channel."""
    source: str | None = None
    """Only this source: the name of an environment."""
    state: Literal["open", "waiting", "ready", "leased", "trained"] | None = None
    """Only this state, in a pool. Dropped and rejected trajectories are never exported."""
    mark: str | None = None
    """Only trajectories with this mark."""
    min_exactness: Literal["engine", "submitted", "retokenized"] | None = None
    """Only steps of this grade or better."""
    reward_min: float | None = None
    """Only rewards of at least this value."""
    reward_max: float | None = None
    """Only rewards of at most this value."""
    version_min: int | None = None
    """Only trajectories with a token of this policy version or a newer one."""
    version_max: int | None = None
    """Only trajectories with a token of this policy version or an older one."""
    since: datetime | None = None
    """Only trajectories started at this time or later: 2026-11-15, 2026-11-15T08:30, or seconds since 1970."""
    until: datetime | None = None
    """Only trajectories started at this time or earlier."""
    limit: int | None = Field(default=None, ge=1)
    """At most this number of trajectories."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.state is not None and self.from_ is not None:
            raise ValueError("--state selects a state in a pool; trajectories in files have no state")
        if self.best is not None and self.shape != "sft":
            raise ValueError("--best belongs to --shape sft")
        if self.margin and self.shape != "preferences":
            raise ValueError("--margin belongs to --shape preferences")
        return self


class ImportSettings(PoolSection):
    """Send exported groups, or those of an archive, into a running pool. Groups that the pool has are skipped."""

    model_config = SettingsConfigDict(env_prefix="STEPWELL_IMPORT_")

    path: CliPositionalArg[str]
    """Parquet or JSONL file, or folder or fsspec URL of them: an export of --shape steps, or an archive."""
    channel: str | None = None
    """Send all groups to this channel; without it, to the channel in the file. An archive names no channel."""
