"""`stepwell envs run`: rollouts of a framework's tasks, recorded by a gateway, with the framework's rewards."""

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from pydantic_settings import CliPositionalArg

from stepwell.commands.sections import GROUP_SIZE, Listed, Section
from stepwell.common.command_line import say
from stepwell.errors import StepwellError

if TYPE_CHECKING:
    from stepwell.agents.rollout import RolloutCounts


class EnvsRunSettings(Section, env_prefix="STEPWELL_ENVS_"):
    """Make rollouts of tasks that were written for verifiers or Harbor. Each is a trajectory with the reward that the
    framework gives it; the rollouts of one task are a group.

    The framework runs in a process of its own.
    """

    examples = (
        "stepwell envs run verifiers my-taskset-v1 --python verifiers-env/bin/python --group-size 8",
        "stepwell envs run harbor tasks/ --python harbor-env/bin/python --timeout 1800",
    )

    framework: CliPositionalArg[Literal["verifiers", "harbor"]]
    """The framework whose tasks these are."""
    tasks: CliPositionalArg[str]
    """verifiers: the id of a taskset. Harbor: the folder of a task, or a folder of such folders."""
    gateway: str = "http://127.0.0.1:8100"
    """Address of the gateway."""
    key: str | None = None
    """A control key of the gateway, or a runner's. Prefer STEPWELL_ENVS_KEY: other users can read a command line."""
    python: str | None = None
    """Python of the environment that has the framework; without it, this one."""
    config: str | None = None
    """JSON file with settings of the framework. verifiers: env, sampling, limit. Harbor: fields of its TrialConfig."""
    variables: Listed = ()
    """Environment variables that the framework gets besides the basic ones (PATH, HOME, LANG, SSL_CERT_FILE …): keys of
    other services, PYTHONPATH, DOCKER_HOST, HTTPS_PROXY. A variable that is not named here does not reach it."""
    channel: str = "train"
    """The channel of the trajectories."""
    group_size: int = Field(default=8, ge=1, validation_alias=GROUP_SIZE)
    """Rollouts of each task. --n-rollouts is another name of this flag."""
    groups: int | None = Field(default=None, ge=1)
    """Groups to make; without it, as many as the epochs have."""
    epochs: int | None = Field(default=1, ge=1)
    """How often every task comes."""
    seed: int | None = 0
    """Seed of the order of the tasks."""
    concurrency: int = Field(default=16, ge=1)
    """Rollouts at once."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds of one rollout, the scoring included."""
    retries: int = Field(default=3, ge=0)
    """New tries of a rollout that failed for a reason outside the policy."""


def run_envs(settings: EnvsRunSettings) -> None:
    began = time.monotonic()
    counts = asyncio.run(make_rollouts(settings))
    say(counts.line(0, time.monotonic() - began))
    if not counts.groups:
        raise StepwellError("no group was made; the messages above say why")


async def make_rollouts(settings: EnvsRunSettings) -> "RolloutCounts":
    from stepwell.agents.blackbox import BlackBoxAgentFlow
    from stepwell.agents.dataset import Dataset
    from stepwell.agents.foreign import TasksBroken, TasksProcess
    from stepwell.agents.rollouter import AsyncRollouter

    python = settings.python or sys.executable
    config = None if settings.config is None else Path(settings.config)
    async with TasksProcess(
        settings.framework, settings.tasks, python=python, config=config, variables=settings.variables
    ) as tasks:
        flow = BlackBoxAgentFlow(
            settings.gateway,
            tasks.run,
            key=settings.key,
            channel=settings.channel,
            group_size=settings.group_size,
            timeout=settings.timeout,
            retry_on=(TasksBroken,),
        )
        dataset = Dataset(tasks.samples, seed=settings.seed, epochs=settings.epochs)
        rollouter = AsyncRollouter(
            flow, dataset, gateway=settings.gateway, concurrency=settings.concurrency, retries=settings.retries
        )
        return await rollouter.run(settings.groups)
