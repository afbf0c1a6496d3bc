"""The settings of the commands that score: `stepwell rewards`, `stepwell reward try` and `stepwell rescore`."""

import json
from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator
from pydantic_settings import CliPositionalArg, NoDecode, SettingsConfigDict

from stepwell.config.sections import RaySection, Section


class FunctionSection(Section):
    """How a reward function is called."""

    options: Annotated[dict[str, JsonValue], NoDecode] = Field(default_factory=dict)
    """A JSON object: the options of a built-in function."""
    tokenizer_path: str | None = None
    """Folder or name of the Hugging Face tokenizer, for functions that read texts."""
    timeout: float = Field(default=30.0, gt=0)
    """Seconds that one call may take."""
    memory_mb: int = Field(default=2_048, ge=64)
    """Megabytes of memory for each process that runs the function."""
    sandbox: Literal["strict", "user", "none"] = "strict"
    """Where generated code runs: in bubblewrap, as another user (needs root), or with the worker's rights."""
    children: int = Field(default=2, ge=1, le=1_024)
    """Processes that run the function; each runs one call at a time, or many calls of an async function."""

    @field_validator("options", mode="before")
    @classmethod
    def _is_object(cls, value: object) -> object:
        try:
            read = json.loads(value) if isinstance(value, str) else value
        except ValueError as failure:
            raise ValueError(f"{value!r} is not JSON: {failure}") from None
        if not isinstance(read, dict):
            raise ValueError(f'{value!r} is not a JSON object; write {{"answer_key": "solution"}}')
        return read


class RewardSettings(RaySection, FunctionSection):
    """Start reward workers on a running Ray cluster, and leave them there. Existing workers of this name are kept.

    They score the unscored trajectories of the DataPool, and answer the gateways' /compute_reward.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_REWARDS_")

    function: str
    """The reward function: module:function, path/to/file.py:function, or the name of a built-in."""
    data_pool_name: str = "data_pool"
    """Name of the DataPool's Ray actor; the pool must have been created with --require-reward."""
    name: str = "reward_loop_worker"
    """Name of the first worker's Ray actor, which gateways use; the others are NAME-1, NAME-2 and so on."""
    workers: int = Field(default=1, ge=1, le=1_024)
    """Number of actors, spread over the nodes that offer CPUs; the head's node only if there is no other."""
    cpus: float | None = Field(default=None, ge=0)
    """CPUs that each actor reserves; without it, one if the cluster has enough."""


class OfflineSection(FunctionSection):
    model_config = SettingsConfigDict(env_prefix="STEPWELL_REWARD_")

    function: CliPositionalArg[str]
    """The reward function: module:function, path/to/file.py:function, or the name of a built-in."""


class TrySettings(OfflineSection):
    """Call a reward function on stored trajectories and print its scores. Nothing is written; Ray is not needed."""

    on: str
    """Parquet file, or folder or fsspec URL of Parquet files, from a pool's archive or Batch.to_arrow()."""
    limit: int = Field(default=20, ge=1)
    """At most this number of trajectories."""


class RescoreSettings(OfflineSection):
    """Copy stored trajectories with the rewards of another function, as the next revision. Ray is not needed."""

    from_: str = Field(alias="from")
    """Parquet file, or folder or fsspec URL of Parquet files: a pool's archive."""
    to: str
    """Folder or fsspec URL for the copies; it must not contain a Parquet file yet."""
