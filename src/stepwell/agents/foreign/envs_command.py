"""`stepwell envs run`: rollouts of a framework's tasks, recorded by a gateway, with the framework's rewards."""

import asyncio
import sys
import time
from pathlib import Path

from stepwell.agents.blackbox import BlackBoxAgentFlow
from stepwell.agents.dataset import Dataset
from stepwell.agents.foreign.tasks_process import TasksBroken, TasksProcess
from stepwell.agents.rollout import RolloutCounts
from stepwell.agents.rollouter import AsyncRollouter
from stepwell.config.envs_run import EnvsRunSettings
from stepwell.errors import StepwellError


def run_envs(settings: EnvsRunSettings) -> None:
    began = time.monotonic()
    counts = asyncio.run(make_rollouts(settings))
    sys.stdout.write(f"{counts.line(0, time.monotonic() - began)}\n")
    if not counts.groups:
        raise StepwellError("no group was made; the messages above say why")


async def make_rollouts(settings: EnvsRunSettings) -> RolloutCounts:
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
