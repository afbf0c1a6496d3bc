"""The settings of `stepwell lineage`."""

from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from stepwell.config.sections import Section


class LineageSettings(Section):
    """Show what a version of the policy was trained on, or which versions a trajectory is in, from an archive.

    Trajectories are named by hashes of their uids.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_LINEAGE_")

    archive: str
    """The archive of the pool: a folder or fsspec URL."""
    version: int | None = None
    """Show the batches that this version of the policy was made from."""
    trajectory: str | None = None
    """Show the batches and versions that this trajectory is in, by its uid or the hash of it."""
    verify: bool = False
    """Also rebuild these batches from the archive, and compare their hashes. It fails if one differs."""
    as_json: bool = Field(default=False, alias="json")
    """Print it as JSON."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.version is None) == (self.trajectory is None):
            raise ValueError("name --version or --trajectory, one of them")
        return self
