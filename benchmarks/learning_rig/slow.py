"""The calculator task with a slow calculator; and a process of agents that can also make one batch at a time.

python -m benchmarks.learning_rig.slow ORDERS
"""

import asyncio
import random
import sys
import time

from benchmarks.learning_rig.rig import Rig, settings
from stepwell import logs
from stepwell.demo.agent_process import GROUP, Episodes, Orders, serve
from stepwell.demo.tasks import ToolCalling

FASTEST, SLOWEST = 0.1, 1.0
"""Seconds that the calculator takes."""
GROUPS = 8
"""In a batch."""
CONCURRENCY = 2 * GROUPS * GROUP
"""Rollouts that may run at a time, in either form: no batch waits for a place, and one that waits for its tool keeps no
other from the model. Trained synchronously, no more than a batch's can."""
AHEAD = 2
"""Batches, where training is asynchronous."""


class SlowToolCalling(ToolCalling):
    async def calculate(self, arguments: str) -> str:
        await asyncio.sleep(random.uniform(FASTEST, SLOWEST))
        return await super().calculate(arguments)


class BatchedEpisodes(Episodes):
    """Also knows the order `batch`: the rollouts of one batch, answered when the last is over."""

    async def do(self, order: str) -> float:
        if order != "batch":
            return await super().do(order)
        await self.rollouter.run(GROUPS)
        return 0.0


def train_slowly(rig: Rig, updates: int, *, is_async: bool) -> tuple[float, float]:
    """Gives the seconds that training took, and the reward on held-out samples after it."""
    name = "slow_async" if is_async else "slow_sync"
    ahead, module = AHEAD if is_async else 0, "benchmarks.learning_rig.slow"
    with rig.run(name, settings(updates, GROUPS), ahead=ahead, concurrency=CONCURRENCY, module=module) as run:
        began = time.monotonic()
        if is_async:
            run.agents.train()
        for _ in range(updates):
            if not is_async:
                run.agents.tell("batch")
            run.trainer.step()
        seconds = time.monotonic() - began
        run.agents.stop()
        return seconds, run.agents.evaluate()


if __name__ == "__main__":
    logs.setup(json=False)
    asyncio.run(serve(Orders.from_json(sys.argv[1]), SlowToolCalling(), BatchedEpisodes))
