"""Sums, one question and one answer: the smallest useful environment.

    python examples/envs/arithmetic.py process --groups 4 --openai.model-name MODEL

It asks Stepwell's gateway on this machine; --openai.base-url names any other OpenAI-compatible server.
"""

import random
import re
from typing import Any

from stepwell.envs import APIServerConfig, BaseEnv, BaseEnvConfig, Item, ScoredDataItem
from stepwell.envs.servers import ManagedServer, ServerManager


class ArithmeticConfig(BaseEnvConfig):
    digits: int = 2
    """Digits of the numbers to add."""
    answer_tokens: int = 64
    """Most tokens of an answer."""
    eval_questions: int = 32
    """Questions of an evaluation; they are the same each time."""
    seed: int = 0
    """Seed of the questions."""


class Arithmetic(BaseEnv):
    """Sums: 1 for the right number at the end of the answer, else 0."""

    name = "arithmetic"
    env_config_cls = ArithmeticConfig
    checkpoint_fields = ("asked",)
    config: ArithmeticConfig

    @classmethod
    def config_init(cls) -> tuple[ArithmeticConfig, list[APIServerConfig]]:
        return ArithmeticConfig(group_size=8, max_token_length=512), [APIServerConfig()]

    async def setup(self) -> None:
        self.asked = 0

    async def get_next_item(self) -> Item:
        self.asked += 1
        return self.question(f"{self.config.seed} train {self.asked}")

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        async with self.server.managed_server() as session:
            answer = await self.answer(session, item, temperature=1.0)
            (rollout,) = session.get_state()["nodes"]
        return rollout.item(score(answer, item)), []

    async def evaluate(self) -> dict[str, float]:
        questions = [self.question(f"{self.config.seed} eval {n}") for n in range(self.config.eval_questions)]

        async def graded(question: Item) -> float:
            return score(await self.answer(self.server, question, temperature=0.0, split="eval"), question)

        scores = await self.evaluate_each(graded, questions)
        return {"eval/right": sum(scores) / len(scores)}

    def question(self, name: str) -> Item:
        """A name always gives the same question, so that a restart continues where it was."""
        below = 10**self.config.digits
        a, b = (random.Random(f"{name} {part}").randrange(below) for part in "ab")
        return {"text": f"What is {a} + {b}? End with the number.", "sum": a + b}

    async def answer(self, server: ServerManager | ManagedServer, question: Item, **sampling: Any) -> str:
        messages = [{"role": "user", "content": question["text"]}]
        reply = await server.chat_completion(messages=messages, max_tokens=self.config.answer_tokens, **sampling)
        return reply.choices[0].message.content or ""


def score(answer: str, question: Item) -> float:
    numbers = re.findall(r"\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == question["sum"])


if __name__ == "__main__":
    Arithmetic.cli()
