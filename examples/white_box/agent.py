"""A white-box agent: it tokenizes, samples from token ids, builds its steps, submits them and asks for their reward.

python examples/white_box/agent.py
"""

import asyncio
import os
from pathlib import Path

from tokenizers import Tokenizer

from stepwell.agents.dataset import Dataset
from stepwell.agents.rollout import Rollout
from stepwell.agents.rollouter import AsyncRollouter
from stepwell.agents.whitebox import AgentFlowBase

URL, KEY = os.environ["STEPWELL_URL"], os.environ["STEPWELL_KEY"]
TOKENIZER = Tokenizer.from_file(str(Path(os.environ["MODEL"]) / "tokenizer.json"))
SUMS = [{"question": "12 + 34 =", "answer": "46"}, {"question": "27 + 19 =", "answer": "46"}]
SAMPLING = {"temperature": 1.0, "max_tokens": 64}
TRIES = 2


def said_by_user(text: str, *, after: str = "") -> list[int]:
    """A turn in ChatML, and the beginning of the model's."""
    turn = f"{after}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return list(TOKENIZER.encode(turn, add_special_tokens=False).ids)


class Sums(AgentFlowBase):
    """Asks for a sum; a wrong answer gets another try."""

    async def run(self, rollout: Rollout) -> float:
        prompt_ids = said_by_user(rollout.sample["question"])
        reward = 0.0
        for turn in range(TRIES):
            answer = await self.generate(prompt_ids, SAMPLING)
            await self.submit([self.step(rollout, turn, answer)])
            reward = (await self.compute_reward(rollout, answer, num_turns=turn + 1)).reward_score
            text = TOKENIZER.decode(answer.token_ids)
            print(f"{rollout.sample['question']}  try {turn + 1}  reward {reward}  {text}")
            if reward > 0.0:
                break
            # the next prompt has the sampled tokens as they are, so both steps are trained in one row
            prompt_ids = [*prompt_ids, *answer.token_ids, *said_by_user("That is wrong.", after="\n")]
        return reward


async def main() -> None:
    flow = Sums(URL, key=KEY, group_size=4)
    counts = await AsyncRollouter(flow, Dataset(SUMS, epochs=1, seed=None), gateway=URL).run()
    print(f"{counts.groups} groups of 4 rollouts")


if __name__ == "__main__":
    asyncio.run(main())
