"""One rollout at a time through the default collect_trajectories; a backlog, postprocessing, checkpoints of its own.

Written for atroposlib, as its users write: only its names are imported. Each hook that is called is noted in $HOOKS.
"""

import os
from typing import Any

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataItem  # type: ignore[import-not-found]
from atroposlib.envs.server_handling.server_manager import APIServerConfig  # type: ignore[import-not-found]

WORDS = ("well", "step", "water")


def note(hook: str) -> None:
    with open(os.environ["HOOKS"], "a") as file:
        file.write(f"{hook}\n")


class WordsEnv(BaseEnv):  # type: ignore[misc]
    name = "words"

    @classmethod
    def config_init(cls) -> tuple[Any, Any]:
        config = BaseEnvConfig(
            group_size=4,
            use_wandb=False,
            total_steps=100,
            max_num_workers=1,
            max_token_length=256,
            wandb_name="words",
            worker_timeout=60,
        )
        server = APIServerConfig(
            model_name="tiny", base_url=os.environ["ENGINE"], api_key="x", timeout=60, health_check=False
        )
        return config, [server]

    async def setup(self) -> None:
        note("setup")
        self.turn = 0
        self.rollouts = dict[tuple[str, int], int]()

    async def get_next_item(self) -> tuple[str, int]:
        self.turn += 1
        return WORDS[self.turn % len(WORDS)], 0

    async def collect_trajectory(self, item: tuple[str, int]) -> tuple[ScoredDataItem | None, list[Any]]:
        word, depth = item
        reply = await self.server.completion(prompt=f"{word} {depth}:", n=1, max_tokens=4, seed=depth)
        prompt = self.tokenizer.encode(f"{word} {depth}:")
        answer = self.tokenizer.encode(reply.choices[0].text)
        self.rollouts[item] = number = self.rollouts.get(item, 0) + 1
        rollout = ScoredDataItem(
            tokens=prompt + answer,
            masks=[-100] * len(prompt) + answer,
            scores=float(number % self.config.group_size),
            group_overrides={"word": word, "depth": depth},
            overrides={"set_advantage_to_zero": depth > 0},
        )
        is_first = number % self.config.group_size == 1
        return rollout, [(word, depth + 1)] if depth == 0 and is_first else []

    async def postprocess_histories(self, trajectories: Any) -> Any:
        note("postprocess_histories")
        order = sorted(range(len(trajectories["scores"])), key=trajectories["scores"].__getitem__)
        for key in ("tokens", "masks", "overrides", "scores"):
            trajectories[key] = [trajectories[key][place] for place in order]
        trajectories["scores"] = [score - 1.5 for score in trajectories["scores"]]
        return trajectories

    async def evaluate(self, *args: Any, **kwargs: Any) -> None: ...

    async def cleanup(self) -> None:
        note("cleanup")

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        note("save_checkpoint")
        super().save_checkpoint(step, {"turn": self.turn} if data is None else data)


if __name__ == "__main__":
    WordsEnv.cli()
