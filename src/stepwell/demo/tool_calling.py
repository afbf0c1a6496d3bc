"""`tool`: add two numbers with a calculator: call it, read its result, say it."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stepwell.demo.vocabulary import Turn

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageParam, ChatCompletionToolParam
    from openai.types.chat.chat_completion_message_function_tool_call_param import Function

CALCULATOR: "ChatCompletionToolParam" = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}


class ToolCalling:
    updates = 60

    def samples(self) -> list[dict[str, str]]:
        numbers = range(10, 100)
        return [{"sum": f"{a}+{b}", "result": str(a + b)} for a in numbers for b in numbers if a != b]

    def shown(self, sample: Mapping[str, str], chance: random.Random) -> Sequence[Turn]:
        """Every other time the calculator is not asked, and every other time it is not listened to: then one of the
        two numbers is said."""
        operand = chance.choice(sample["sum"].split("+"))
        question = Turn("user", sample["sum"])
        if chance.random() < 0.5:
            return question, Turn("assistant", operand)
        return (
            question,
            Turn("assistant", f'<tool_call>{{"name": "calc", "arguments": {{"x": "{sample["sum"]}"}}}}</tool_call>'),
            Turn("tool", f"<tool_response>{sample['result']}</tool_response>"),
            Turn("assistant", sample["result"] if chance.random() < 0.5 else operand),
        )

    async def play(self, client: "AsyncOpenAI", sample: Mapping[str, str]) -> float:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": sample["sum"]}]
        reply = await _ask(client, messages)
        if reply.tool_calls:
            (call,) = reply.tool_calls[:1]
            assert call.type == "function"
            asked: Function = {"name": call.function.name, "arguments": call.function.arguments}
            messages += [
                {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": asked}]},
                {"role": "tool", "tool_call_id": call.id, "content": await self.calculate(asked["arguments"])},
            ]
            reply = await _ask(client, messages)
        return float(reply.content == sample["result"])

    async def calculate(self, arguments: str) -> str:
        """The calculator, which takes no time."""
        return calculated(arguments)


async def _ask(client: "AsyncOpenAI", messages: "Sequence[ChatCompletionMessageParam]") -> "ChatCompletionMessage":
    reply = await client.chat.completions.create(
        model="demo", messages=messages, tools=[CALCULATOR], temperature=1.0, max_tokens=24
    )
    return reply.choices[0].message


def calculated(arguments: str) -> str:
    """What the calculator says to whatever a model writes."""
    try:
        asked = json.loads(arguments)["x"]
    except (ValueError, TypeError, KeyError):
        asked = arguments
    found = re.fullmatch(r"(\d{1,9})\+(\d{1,9})", str(asked))
    return str(int(found[1]) + int(found[2])) if found else "error"
