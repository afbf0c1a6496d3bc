"""An environment as Atropos' users write it: it imports atroposlib alone, and encodes the answers itself.

python -m stepwell.envs examples/atropos_environment/letters_env.py serve --env.tokenizer_name $MODEL
"""

import os
import random
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer

URL, KEY = os.environ["STEPWELL_URL"], os.environ["STEPWELL_KEY"]
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class LettersEnv(BaseEnv):
    name = "letters"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config = BaseEnvConfig(
            group_size=4,
            max_token_length=512,
            total_steps=-1,
            use_wandb=False,
            rollout_server_url=URL.replace("://", f"://:{KEY}@") + "/atropos",
        )
        return config, [APIServerConfig(base_url=f"{URL}/unrecorded/v1", api_key=KEY, model_name="default")]

    async def setup(self) -> None:
        self.random = random.Random(0)

    async def get_next_item(self) -> str:
        return "".join(self.random.sample(ALPHABET, 8))

    async def collect_trajectories(self, item: str) -> tuple[ScoredDataGroup, list[Any]]:
        asked = [{"role": "user", "content": f"Write one word with as many of these letters as you can: {item}"}]
        completion = await self.server.chat_completion(messages=asked, n=self.config.group_size, max_tokens=24)
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for choice in completion.choices:
            answer = choice.message.content or ""
            chat = [*asked, {"role": "assistant", "content": answer}]
            encoded = tokenize_for_trainer(self.tokenizer, chat, finish_reason=choice.finish_reason)
            group["tokens"].append(encoded["tokens"])
            group["masks"].append(encoded["masks"])
            group["scores"].append(len(set(answer) & set(item)) / len(item))
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None: ...


if __name__ == "__main__":
    LettersEnv.cli()
