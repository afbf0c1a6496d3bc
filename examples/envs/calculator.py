"""Several turns with a tool: products that are easy only with a calculator.

    python examples/envs/calculator.py process --groups 4 --openai.model-name MODEL

vLLM reads tool calls if it is started with --enable-auto-tool-choice and the --tool-call-parser of the model.
"""

import contextlib
import json
import operator
import random
import re
from typing import Any

from stepwell.envs import APIServerConfig, BaseEnv, BaseEnvConfig, Item, ScoredDataItem

SYSTEM = "Solve the task with the calculator. Then write the result on a line of its own: Answer: NUMBER"
HINT = "Call the calculator, or end with: Answer: NUMBER"
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Adds, subtracts or multiplies two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "As in 12 * 34"}},
            "required": ["expression"],
        },
    },
}
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class CalculatorConfig(BaseEnvConfig):
    turns: int = 4
    """Most turns of the model in a rollout."""
    turn_tokens: int = 256
    """Most tokens of a turn."""


class Calculator(BaseEnv):
    """Products of large numbers: 1 for the right answer, 0.1 for a call of the calculator."""

    name = "calculator"
    env_config_cls = CalculatorConfig
    config: CalculatorConfig

    @classmethod
    def config_init(cls) -> tuple[CalculatorConfig, list[APIServerConfig]]:
        return CalculatorConfig(group_size=8, max_token_length=4096), [APIServerConfig()]

    async def get_next_item(self) -> Item:
        a, b, c = (random.randrange(100, 1000) for _ in range(3))
        return {"task": f"What is {a} * {b} - {c}?", "answer": a * b - c}

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": item["task"]}]
        answer: re.Match[str] | None = None
        calls = 0
        async with self.server.managed_server() as session:
            for _ in range(self.config.turns):
                reply = await session.chat_completion(
                    messages=messages, tools=[CALCULATOR], max_tokens=self.config.turn_tokens, temperature=1.0
                )
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                answer = re.search(r"Answer:\s*(-?\d+)\s*$", message.content or "")
                if answer:
                    break
                calls += len(message.tool_calls or ())
                messages += [result(call) for call in message.tool_calls or ()] or [{"role": "user", "content": HINT}]
            *_, rollout = session.get_state()["nodes"]  # the last one has the conversation in its last state
        is_right = answer is not None and int(answer[1]) == item["answer"]
        return rollout.item(1.0 if is_right else 0.1 * bool(calls), messages=messages), []


def result(call: Any) -> dict[str, str]:
    """What the calculator says. What it cannot read is the model's mistake, and is told to it."""
    said = "Not understood: write an expression like 12 * 34"
    with contextlib.suppress(KeyError, TypeError, ValueError):
        expression = json.loads(call.function.arguments)["expression"]
        if read := re.fullmatch(r"\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*", expression):
            said = str(OPERATORS[read[2]](int(read[1]), int(read[3])))
    return {"role": "tool", "tool_call_id": call.id, "content": said}


if __name__ == "__main__":
    Calculator.cli()
