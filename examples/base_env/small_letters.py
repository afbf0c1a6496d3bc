"""An environment in one file: the model shall answer in small letters, and its score is their share.

python examples/base_env/small_letters.py process --groups 3
"""

import os
import random

from stepwell.envs import APIServerConfig, BaseEnv, BaseEnvConfig, Item, ScoredDataItem

URL, KEY = os.environ["STEPWELL_URL"], os.environ["STEPWELL_KEY"]
THINGS = ("the sea", "a train", "bread", "winter", "a violin", "the moon")


class SmallLetters(BaseEnv):
    """Answers in small letters: the score is their share of the answer."""

    name = "small_letters"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config = BaseEnvConfig(group_size=4, rollout_server_url=f"{URL}/atropos", rollout_server_key=KEY)
        return config, [APIServerConfig(base_url=f"{URL}/unrecorded/v1", api_key=KEY)]

    async def get_next_item(self) -> Item:
        return f"Describe {random.choice(THINGS)}. Write small letters only."

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        async with self.server.managed_server() as session:
            reply = await session.chat_completion(messages=[{"role": "user", "content": item}], max_tokens=24)
            (rollout,) = session.get_state()["nodes"]
        return rollout.item(share_of_small_letters(reply.choices[0].message.content or "")), []


def share_of_small_letters(answer: str) -> float:
    written = "".join(answer.split())
    return sum(map(str.islower, written)) / max(len(written), 1)


if __name__ == "__main__":
    SmallLetters.cli()
