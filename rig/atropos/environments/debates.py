"""Several groups of one item, sent by its own handle_send_to_api; an evaluation that is saved; its own command line.

Written for atroposlib, as its users write: only its names are imported. Each hook that is called is noted in $HOOKS.
"""

import os
import time
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ServerBaseline  # type: ignore[import-not-found]
from atroposlib.type_definitions import Item, Message  # type: ignore[import-not-found]

SIDES = ("for", "against")


def note(hook: str) -> None:
    with open(os.environ["HOOKS"], "a") as file:
        file.write(f"{hook}\n")


class DebatesEnv(BaseEnv):  # type: ignore[misc]
    name = "debates"

    @classmethod
    def config_init(cls) -> tuple[Any, Any]:
        assert ServerBaseline().timeout == 1200
        config = BaseEnvConfig(
            group_size=2,
            use_wandb=False,
            total_steps=100,
            steps_per_eval=2,
            max_token_length=256,
            data_dir_to_save_evals=os.environ["EVALS"],
            wandb_name=cls.name,
        )
        return config, [
            APIServerConfig(
                model_name="tiny",
                base_url=os.environ["ENGINE"],
                api_key="x",
                rolling_buffer_length=10,
                health_check=False,
            )
        ]

    @classmethod
    def get_cli_serve_config_cls(cls) -> type:
        class Serve(super().get_cli_serve_config_cls()):  # type: ignore[misc]
            def run(self) -> None:
                note("run of the command line")
                super().run()

        return Serve

    async def setup(self) -> None:
        note("setup")
        self.topic = 0

    async def get_next_item(self) -> int:
        self.topic += 1
        return self.topic % 4

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        return [await self._debate(item, side) for side in SIDES], []

    async def _debate(self, topic: int, side: str) -> dict[str, Any]:
        group: dict[str, Any] = {"tokens": [], "masks": [], "scores": [], "messages": []}
        for place in range(self.config.group_size):
            asked: Message = {"role": "user", "content": f"argue {side} topic {topic}, number {place}"}
            reply = await self.server.chat_completion(messages=[asked], n=1, max_tokens=6, seed=place)
            prompt = self.tokenizer.encode(asked["content"])
            answer = self.tokenizer.encode(reply.choices[0].message.content)
            group["tokens"].append(prompt + answer)
            group["masks"].append([-100] * len(prompt) + answer)
            group["scores"].append(float(place))
            group["messages"].append([asked])
        return group | {"group_overrides": {"topic": topic, "side": side}}

    async def handle_send_to_api(self, scored_data: Any, item: Item = None, **options: Any) -> None:
        note("handle_send_to_api")
        for group in scored_data if isinstance(scored_data, list) else [scored_data]:
            group["group_overrides"]["sent_for"] = item
        await super().handle_send_to_api(scored_data, item, **options)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        note("evaluate")
        started = time.time()
        await self.evaluate_log(
            metrics={"eval/score": 0.5},
            task_name="debates",
            model_name="tiny",
            start_time=started,
            end_time=started,
            generation_parameters={"temperature": 0.5},
            samples=[{"question": "?", "score": 1}],
            verbose=False,
        )


if __name__ == "__main__":
    DebatesEnv.cli()
