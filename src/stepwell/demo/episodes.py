"""The demo's agents, as their own process, which uses only a gateway.

    python -m stepwell.demo.agent_process ORDERS

It follows `evaluate` (each held-out sample several times; the answer is the mean reward) and `train` (rollouts, as
many as the pool takes, until `stop`; it answers when they have started). See agent_process.py.
"""

import asyncio
import statistics
import sys

from stepwell import logs
from stepwell.agents.blackbox import BlackBoxAgentFlow
from stepwell.agents.dataset import Dataset, Prompt
from stepwell.agents.rollout import Rollout, RolloutResult
from stepwell.agents.rollouter import AsyncRollouter
from stepwell.demo.agent_process import Orders, follow, sdk_client
from stepwell.demo.tasks import TASKS, Task, split

GROUP = 8
"""Rollouts per prompt."""
TIMES = 4
"""Rollouts per held-out sample in an evaluation."""
VALIDATION = "validation"


class SdkAgent:
    """A task's agent with an OpenAI client for each rollout; all clients share their connections."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._client = sdk_client("http://127.0.0.1")

    async def __call__(self, rollout: Rollout) -> float:
        client = self._client.with_options(base_url=rollout.base_url, api_key=rollout.api_key)
        return await self._task.play(client, rollout.sample)


class Episodes:
    def __init__(self, gateway: str, orders: Orders, task: Task) -> None:
        samples, held_out = split(task, orders.seed)
        self._held_out = Dataset(held_out, seed=None)
        agent = SdkAgent(task)
        self._validation = BlackBoxAgentFlow(gateway, agent, channel=VALIDATION, group_size=TIMES)
        training = BlackBoxAgentFlow(gateway, agent, group_size=GROUP)
        dataset = Dataset(samples, seed=orders.seed)
        self.rollouter = AsyncRollouter(training, dataset, gateway=gateway, concurrency=orders.concurrency)
        self._free = asyncio.Semaphore(orders.concurrency)
        self._training: asyncio.Task[object] | None = None

    async def do(self, order: str) -> float:
        match order:
            case "evaluate":
                return await self.evaluate()
            case "train":
                self._training = asyncio.create_task(self.rollouter.run())
            case "stop":
                await self.stop()
        return 0.0

    async def evaluate(self) -> float:
        """The mean reward on the held-out samples."""
        prompts = self._held_out.rest_of_epoch()
        async with self._validation:
            results = await asyncio.gather(*(self._try(prompt) for prompt in prompts for _ in range(TIMES)))
        return statistics.fmean(result.reward for result in results if result.reward is not None)

    async def stop(self) -> None:
        """Aborts the running rollouts."""
        if self._training is not None:
            self._training.cancel()
            await asyncio.gather(self._training, return_exceptions=True)

    async def _try(self, prompt: Prompt) -> RolloutResult:
        async with self._free:
            return await self._validation.rollout(prompt.sample, prompt.uid)


async def serve(orders: Orders, task: Task, make: type[Episodes] = Episodes) -> None:
    await follow(orders, lambda gateway: make(gateway, orders, task))


if __name__ == "__main__":
    logs.setup(json=False)
    told = Orders.from_json(sys.argv[1])
    asyncio.run(serve(told, TASKS[told.task]))
