"""The settings: defaults < environment < flags. An unknown key is an error.

A field's docstring is its line in --help.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, CliPositionalArg, NoDecode, SettingsConfigDict

from stepwell.core.limits import Limits, OnDeadline, OnRewardFailure, OnStale, Overflow
from stepwell.errors import BadRequest

S = TypeVar("S", bound=BaseSettings)


class Section(BaseSettings):
    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_implicit_flags=True,
    )


class RaySection(Section):
    ray_address: str = "auto"
    """Ray's address, host:port; auto is the cluster on this machine."""
    ray_namespace: str = "default"
    """Ray namespace the DataPool lives in."""


class PoolSettings(RaySection):
    """Create the DataPool on a running Ray cluster, and leave it there. Finding it there already is fine."""

    model_config = SettingsConfigDict(env_prefix="STEPWELL_POOL_")

    name: str = "data_pool"
    """Name of the DataPool's Ray actor."""
    shards: int = Field(default=1, ge=1, le=256)
    """Actors the pool is made of."""
    journal: str | None = None
    """Folder of the journals; with one, a pool that is killed comes back with all it had acknowledged."""
    archive: str | None = None
    """Folder or fsspec URL that trained groups leave for, as Parquet; needs a journal."""
    max_queue_size: int = Field(default=10_000, ge=1)
    """Groups held per channel and shard."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Bytes held per channel and shard."""
    overflow: Literal["drop_oldest", "refuse"] = "drop_oldest"
    """What a full channel does: drop_oldest, or refuse new trajectories."""
    group_size: int = Field(default=1, ge=1)
    """Trajectories in a group, where whoever registers them does not say."""
    group_deadline: float | None = Field(default=None, gt=0)
    """Seconds a group may take to complete."""
    on_deadline: Literal["partial", "drop", "refill"] = "partial"
    """What happens then: ship it partial, drop it, or refill it."""
    min_group_size: int = Field(default=1, ge=1)
    """The fewest trajectories a partial group is shipped with."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Policy versions the oldest token may be behind when it is shipped."""
    on_stale: Literal["drop", "keep", "mask"] = "drop"
    """What happens to older data: drop, keep, or mask its tokens."""
    require_reward: bool = False
    """Hold a group back until each of its trajectories has a reward; offer those without to reward workers."""
    reward_attempts: int = Field(default=3, ge=1)
    """How often reward workers may fail to score a trajectory."""
    on_reward_failure: Literal["drop", "drop_group", "keep"] = "drop"
    """What happens then: drop the trajectory, drop its group, or keep it, without a reward."""
    history_size: int = Field(default=0, ge=0)
    """Trained groups kept per channel and shard, for batches that mix in history."""
    batch_size: int | None = Field(default=None, ge=1)
    """Trajectories a training step takes, for pacing; without it, what the last fetch took."""

    def limits(self) -> Limits:
        return Limits(
            **self.model_dump(
                include=set(Limits.__slots__) - {"overflow", "on_deadline", "on_stale", "on_reward_failure"}
            ),
            overflow=Overflow(self.overflow),
            on_deadline=OnDeadline(self.on_deadline),
            on_stale=OnStale(self.on_stale),
            on_reward_failure=OnRewardFailure(self.on_reward_failure),
        )

    @model_validator(mode="after")
    def _archive_needs_a_journal(self) -> Self:
        if self.archive is not None and self.journal is None:
            raise ValueError("--archive needs --journal: groups wait there until their file is written")
        return self


class GatewaySettings(RaySection):
    """The gateway: agents call it as they would call OpenAI, and every call becomes a step in the DataPool."""

    model_config = SettingsConfigDict(env_prefix="STEPWELL_GATEWAY_")

    data_pool_name: str
    """Name of the DataPool's Ray actor."""
    vllm_addresses: Annotated[tuple[str, ...], NoDecode]
    """Addresses of the vLLM servers, separated by commas; calls go to them in turn."""
    tokenizer_path: str
    """Folder or name of the Hugging Face tokenizer. It decodes text for rewards; recording never uses it."""
    prompt_length: int = Field(ge=1)
    """Longest prompt, in tokens, that a trainer will take; a longer one is answered, and quarantined."""
    response_length: int = Field(ge=1)
    """Longest response, in tokens; no engine is asked for more."""
    reward_worker_name: str | None = None
    """Name of the reward worker's Ray actor, if there is one."""
    control_keys: Annotated[tuple[str, ...], NoDecode] = ()
    """Keys that may do everything, separated by commas: the current one first, then older ones. Without any, all is
    open. Better given by STEPWELL_GATEWAY_CONTROL_KEYS than on the command line, where others can read it."""
    engine_key: str | None = None
    """Key that the engines ask for."""
    routing: Literal["round_robin", "least_busy", "sticky"] = "round_robin"
    """Which engine gets a call: round_robin, least_busy, or sticky (always the same one for a trajectory)."""
    durability: Literal["async", "sync"] = "async"
    """async answers at once; sync answers only after the pool has confirmed the step."""
    spool: str | None = None
    """File in which steps wait for the pool, so that they outlive this process; without one they wait in memory."""
    atropos: bool = False
    """Serve the Atropos door too, below /atropos."""
    atropos_state: str | None = None
    """File in which the door's registrations and steps outlive this process."""
    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int = Field(default=8100, ge=0, le=65535)
    """Port to listen on."""

    @field_validator("vllm_addresses", "control_keys", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return _split(value)

    @field_validator("vllm_addresses")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            if not address.startswith(("http://", "https://")):
                raise ValueError(f"{address!r} is no address; write http://host:port,http://host:port")
        return tuple(address.rstrip("/") for address in value)


class AtroposSettings(RaySection):
    """The Atropos door: environments and trainers written for Atropos use it as their server, with the DataPool behind.

    Below /channel/NAME it serves further channels, each with a trainer of its own.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_ATROPOS_")

    data_pool_name: str = "data_pool"
    """Name of the DataPool's Ray actor."""
    control_keys: Annotated[tuple[str, ...], NoDecode] = ()
    """Keys that may do everything, separated by commas: the current one first, then older ones. Without any, all is
    open. Better given by STEPWELL_ATROPOS_CONTROL_KEYS than on the command line, where others can read it."""
    state: str | None = None
    """File in which registrations and steps outlive this process; without one, they are forgotten with it."""
    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on."""

    @field_validator("control_keys", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return _split(value)


class FunctionSection(Section):
    """How a reward function is called, wherever that is."""

    options: Annotated[dict[str, JsonValue], NoDecode] = {}
    """A JSON object: the options of a built-in function."""
    tokenizer_path: str | None = None
    """Folder or name of the Hugging Face tokenizer, for functions that read texts."""
    timeout: float = Field(default=30.0, gt=0)
    """Seconds one call may take."""
    memory_mb: int = Field(default=2_048, ge=64)
    """Megabytes that a process of the function's may take."""
    children: int = Field(default=2, ge=1, le=1_024)
    """Processes in which the function is called; in each, one call at a time, or many of an async function."""

    @field_validator("options", mode="before")
    @classmethod
    def _is_object(cls, value: object) -> object:
        try:
            read = json.loads(value) if isinstance(value, str) else value
        except ValueError as failure:
            raise ValueError(f"{value!r} is no JSON: {failure}") from None
        if not isinstance(read, dict):
            raise ValueError(f'{value!r} is no JSON object; write {{"answer_key": "solution"}}')
        return read


class RewardSettings(RaySection, FunctionSection):
    """Start reward workers on a running Ray cluster, and leave them there. Finding them there already is fine.

    They score what the DataPool holds that no one has rewarded, and answer the gateways' /compute_reward.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_REWARDS_")

    function: str
    """The reward function: module:function, path/to/file.py:function, or the name of a built-in."""
    data_pool_name: str = "data_pool"
    """Name of the DataPool's Ray actor; the pool must have been created with --require-reward."""
    name: str = "reward_loop_worker"
    """Name of the first worker's Ray actor, which is the one a gateway is told; the others are NAME-1 and so on."""
    workers: int = Field(default=1, ge=1, le=1_024)
    """Actors, spread over the cluster."""


class OfflineSection(FunctionSection):
    model_config = SettingsConfigDict(env_prefix="STEPWELL_REWARD_")

    function: CliPositionalArg[str]
    """The reward function: module:function, path/to/file.py:function, or the name of a built-in."""


class TrySettings(OfflineSection):
    """Call a reward function on stored trajectories and print what it gives. Nothing is written; no Ray is needed."""

    on: str
    """Parquet file, or folder or fsspec URL of Parquet files, from a pool's archive or Batch.to_arrow()."""
    limit: int = Field(default=20, ge=1)
    """Trajectories at most."""


class RescoreSettings(OfflineSection):
    """Copy stored trajectories with the rewards of another function, as the next revision. No Ray is needed."""

    from_: str = Field(alias="from")
    """Parquet file, or folder or fsspec URL of Parquet files: a pool's archive."""
    to: str
    """Folder or fsspec URL for the copies, without any Parquet file yet."""


class DemoSettings(Section):
    """A tiny model, made on the spot, learns from what its agent does, served by a real vLLM on a bare CPU.

    It takes some four minutes on two cores, and leaves its numbers, its picture and its logs in a folder.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_DEMO_")

    task: Literal["rev", "tool"] = "rev"
    """What is learned: rev, to say a word backwards; tool, to use a calculator and say its result."""
    seed: int = 0
    """Decides the model, the held-out samples and the order of the others."""
    updates: int | None = Field(default=None, ge=1)
    """Batches to train on; without it, as many as the task takes."""
    out: Path = Path("stepwell-demo")
    """Folder for what comes of it; what an earlier run left there is written over."""
    plot: bool = True
    """Draw the reward as it rises, and leave a picture of it."""
    vllm_python: str | None = None
    """Python of the environment that vLLM is in; without it, this one or the one in the cache is taken."""


def read_settings(settings: type[S], argv: Sequence[str], command: str) -> S:
    """The settings from the environment and the flags. BadRequest says what is wrong with them, a line each."""
    try:
        return settings(_cli_parse_args=list(argv), _cli_prog_name=command)
    except ValidationError as wrong:
        raise BadRequest("\n".join(_explained(error["loc"], error["msg"]) for error in wrong.errors())) from None


def _split(value: object) -> object:
    return value.split(",") if isinstance(value, str) and value else value or ()


def _explained(where: tuple[int | str, ...], message: str) -> str:
    flag = "".join(f"--{str(name).replace('_', '-')}: " for name in where[:1])
    return flag + message.removeprefix("Value error, ")
