"""The settings of `stepwell export` and `stepwell import`."""

from datetime import datetime
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from stepwell.config.sections import RaySection


class ExportSettings(RaySection):
    """Write what a running pool holds, or what an archive has, to Parquet, JSONL or a dataset's folder.

    Reading changes nothing, and training goes on. Filters are combined: what is exported passes all of them.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_EXPORT_")

    to: str
    """Path or fsspec URL to write: x.parquet, x.jsonl, or a folder for a dataset. What is there is not written over."""
    from_: str | None = Field(default=None, alias="from")
    """Read this instead of a pool: an archive, an earlier export, or any folder or file of them."""
    data_pool_name: str = "data_pool"
    """Name of the DataPool's Ray actor."""
    format: Literal["parquet", "jsonl", "dataset"] | None = None
    """Where the path's ending does not say it. A dataset is a folder with data/*.parquet."""
    shape: Literal["steps", "sft", "preferences"] = "steps"
    """steps: all that is known, to be imported again. sft: an example a step. preferences: pairs within groups."""
    tokenizer_path: str | None = None
    """Folder or name of the Hugging Face tokenizer, for the texts of sft and preferences; without it, ids alone."""
    best: int | None = Field(default=None, ge=1)
    """sft: so many trajectories of each group, those with the highest rewards."""
    margin: float = Field(default=0.0, ge=0)
    """preferences: how much higher the better reward must be at least; equal ones are no pair."""
    channel: str | None = None
    """Of this channel."""
    source: str | None = None
    """Of this source: an environment's name."""
    state: Literal["open", "waiting", "ready", "leased", "trained"] | None = None
    """In this state, in a pool. What was dropped or rejected is never exported."""
    mark: str | None = None
    """With this mark."""
    min_exactness: Literal["engine", "submitted", "retokenized"] | None = None
    """With steps of this grade or better only."""
    reward_min: float | None = None
    """With this reward or more."""
    reward_max: float | None = None
    """With this reward or less."""
    version_min: int | None = None
    """With no token of an older policy version."""
    version_max: int | None = None
    """With no token of a newer policy version."""
    since: datetime | None = None
    """Begun at this time or later: 2026-11-15, 2026-11-15T08:30, or seconds since 1970."""
    until: datetime | None = None
    """Begun at this time or before."""
    limit: int | None = Field(default=None, ge=1)
    """Trajectories at most."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.state is not None and self.from_ is not None:
            raise ValueError("--state asks for a state in a pool; what is in files has none")
        if self.best is not None and self.shape != "sft":
            raise ValueError("--best belongs to --shape sft")
        if self.margin and self.shape != "preferences":
            raise ValueError("--margin belongs to --shape preferences")
        return self


class ImportSettings(RaySection):
    """Send exported groups, or those of an archive, into a running pool. What is there already is not taken twice."""

    model_config = SettingsConfigDict(env_prefix="STEPWELL_IMPORT_")

    path: CliPositionalArg[str]
    """Parquet or JSONL file, or folder or fsspec URL of them: an export of --shape steps, or an archive."""
    data_pool_name: str = "data_pool"
    """Name of the DataPool's Ray actor."""
    channel: str | None = None
    """Into this channel, whatever the file says; an archive does not say any."""
