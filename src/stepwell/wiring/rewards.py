"""`stepwell rewards`, `stepwell reward try` and `stepwell rescore`."""

import asyncio
import logging
from functools import partial
from pathlib import Path

from stepwell.config.rewards import FunctionSection, RescoreSettings, RewardSettings, TrySettings
from stepwell.pool.client import PoolClient
from stepwell.rewards.confinement.sandbox import SandboxLevel
from stepwell.rewards.offline import rescore, try_function
from stepwell.rewards.runner.messages import Job
from stepwell.steps.parquet import ParquetReader
from stepwell.wiring.pool_access import join_pool
from stepwell.wiring.stdout import say

log = logging.getLogger("stepwell")


def run_rewards(settings: RewardSettings) -> None:
    """Starts the reward workers or finds them; Ray keeps them running."""
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
    job = _job(settings.function, settings)
    asyncio.run(try_function(job, ParquetReader(settings.on), limit=settings.limit, say=say))


def run_rescore(settings: RescoreSettings) -> None:
    job = _job(settings.function, settings)
    asyncio.run(rescore(job, ParquetReader(settings.from_), settings.to, say=say))


def _job(function: str, settings: FunctionSection) -> Job:
    """The settings have the same names in both."""
    same = settings.model_dump(include=set(FunctionSection.model_fields) - {"sandbox"})
    return Job(function=function, folder=str(Path.cwd()), sandbox=SandboxLevel(settings.sandbox), **same)
