"""An environment whose items are numbers and whose rollouts are made up, held back by gates; also a program."""

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from stepwell.envs import APIServerConfig, BaseEnv, BaseEnvConfig, Item, ScoredDataItem


class CountingEnv(BaseEnv):
    checkpoint_fields = ("position",)

    def __init__(self, config: BaseEnvConfig) -> None:
        super().__init__(config, [APIServerConfig()])
        self.position = 0
        self.last_item: int | None = None
        self.begun: list[int] = []
        self.evaluations = 0
        self.cleanups = 0
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.may_end_evaluation = asyncio.Event()
        self.may_end_evaluation.set()

    async def get_next_item(self) -> Item:
        if self.last_item is not None and self.position > self.last_item:
            raise StopAsyncIteration
        self.position += 1
        return self.position - 1

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        self.begun.append(item)
        await self.may_finish.wait()
        return await super().collect_trajectories(item)

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        return rollout(item, score=self.next_score()), []

    def next_score(self) -> float:
        self._scored = getattr(self, "_scored", 0) + 1
        return float(self._scored % 2)

    async def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, float]:
        self.evaluations += 1
        await self.may_end_evaluation.wait()
        return {"eval/accuracy": 1.0}

    async def cleanup(self) -> None:
        self.cleanups += 1


def rollout(item: int, score: float) -> ScoredDataItem:
    return {
        "tokens": [item, 1, 2],
        "masks": [-100, 1, 2],
        "scores": score,
        "inference_logprobs": [1.0, -0.5, -0.25],
        "policy_version": 3,
    }


def counting(url: str = "http://127.0.0.1:9", **config: Any) -> CountingEnv:
    return CountingEnv(BaseEnvConfig(rollout_server_url=url, **({"group_size": 4, "max_num_workers": 2} | config)))


if __name__ == "__main__":
    from stepwell import logs
    from stepwell.envs.loop.lifecycle import serve

    logs.setup(json=False)

    async def main(url: str) -> None:
        await serve(counting(url, wandb_name="counting"))

    asyncio.run(main(sys.argv[1]))
