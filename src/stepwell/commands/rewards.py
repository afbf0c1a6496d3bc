"""The commands that score: `stepwell rewards`, `stepwell reward try` and `stepwell rescore`."""

import asyncio
import json
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, JsonValue, field_validator
from pydantic_settings import CliPositionalArg, NoDecode

from stepwell.commands.sections import PoolSection, Section, join_pool
from stepwell.common.command_line import say

if TYPE_CHECKING:
    from stepwell.rewards.runner.messages import Job

log = logging.getLogger("stepwell")


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


class RewardSettings(PoolSection, FunctionSection, env_prefix="STEPWELL_REWARDS_"):
    """Start reward workers on a running Ray cluster, and leave them there. Existing workers of this name are kept.

    They score the unscored trajectories of the DataPool, and answer the gateways' /compute_reward.
    """

    examples = (
        "stepwell rewards --function my_rewards.py:score --workers 2 --tokenizer-path Qwen/Qwen3-0.6B",
        "stepwell rewards --function math_equal --tokenizer-path Qwen/Qwen3-0.6B",
    )

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


class OfflineSection(FunctionSection, env_prefix="STEPWELL_REWARD_"):
    function: CliPositionalArg[str]
    """The reward function: module:function, path/to/file.py:function, or the name of a built-in."""


class TrySettings(OfflineSection):
    """Call a reward function on stored trajectories and print its scores. Nothing is written; Ray is not needed."""

    examples = ("stepwell reward try my_rewards.py:score --on steps.parquet --limit 10",)

    on: str
    """Parquet file, or folder or fsspec URL of Parquet files, from a pool's archive or Batch.to_arrow()."""
    limit: int = Field(default=20, ge=1)
    """At most this number of trajectories."""


class RescoreSettings(OfflineSection):
    """Copy stored trajectories with the rewards of another function, as the next revision. Ray is not needed."""

    examples = ("stepwell rescore my_rewards.py:score --from archive --to archive-2",)

    from_: str = Field(alias="from")
    """Parquet file, or folder or fsspec URL of Parquet files: a pool's archive."""
    to: str
    """Folder or fsspec URL for the copies; it must not contain a Parquet file yet."""


def run_rewards(settings: RewardSettings) -> None:
    """Starts the reward workers or finds them; Ray keeps them running."""
    from stepwell.pool.client import PoolClient
    from stepwell.rewards.worker import RewardPlan, start_rewards

    if not asyncio.run(join_pool(settings).shards.plan()).limits.require_reward:
        log.warning("DataPool %r does not require rewards, so it offers nothing to score", settings.data_pool_name)
    job = _job(settings.function, settings)
    plan = RewardPlan(name=settings.name, workers=settings.workers, cpus=settings.cpus, job=job)
    pool_client = partial(PoolClient, settings.data_pool_name, settings.ray_namespace)
    in_force = start_rewards(plan, pool_client, settings.ray_namespace)
    if in_force != plan:
        log.warning("reward worker %r runs already with other settings, which are kept: %s", plan.name, in_force)
    log.info(
        "%d reward workers are up in Ray namespace %r; generated code runs in a sandbox of level %s",
        *(in_force.workers, settings.ray_namespace, in_force.job.sandbox),
    )


def run_try(settings: TrySettings) -> None:
    from stepwell.rewards.offline import try_function
    from stepwell.steps.arrow import ParquetReader

    job = _job(settings.function, settings)
    asyncio.run(try_function(job, ParquetReader(settings.on), limit=settings.limit, say=say))


def run_rescore(settings: RescoreSettings) -> None:
    from stepwell.rewards.offline import rescore
    from stepwell.steps.arrow import ParquetReader

    job = _job(settings.function, settings)
    asyncio.run(rescore(job, ParquetReader(settings.from_), settings.to, say=say))


def _job(function: str, settings: FunctionSection) -> "Job":
    """The settings have the same names in both."""
    from stepwell.rewards.confinement.sandbox import SandboxLevel
    from stepwell.rewards.runner.messages import Job

    same = settings.model_dump(include=set(FunctionSection.model_fields) - {"sandbox"})
    return Job(function=function, folder=str(Path.cwd()), sandbox=SandboxLevel(settings.sandbox), **same)
