"""What the demo's model can learn: `rev`, to reverse a word, and `tool`, to call a calculator and repeat its result."""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Protocol, TypeAlias

from stepwell.demo.model import ScriptTurn

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageParam, ChatCompletionToolParam
    from openai.types.chat.chat_completion_message_function_tool_call_param import Function

Sample: TypeAlias = Mapping[str, str]

HELD_OUT = 64
"""Samples that neither the warm-up nor the training uses."""
LETTERS = "abcdefgh"
CALCULATOR: "ChatCompletionToolParam" = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}


class Task(Protocol):
    @property
    def updates(self) -> int:
        """Number of updates after which the model has learned it."""

    def samples(self) -> Sequence[Sample]: ...

    def shown(self, sample: Sample, rng: random.Random) -> Sequence[ScriptTurn]:
        """A conversation for the warm-up, with a right or a wrong answer."""

    async def play(self, client: "AsyncOpenAI", sample: Sample) -> float:
        """The agent, which uses only an OpenAI client. Returns the reward, 0 or 1."""


class Reversing:
    """Reverse a word of three letters. The prompt is the word alone."""

    updates = 150

    def samples(self) -> list[dict[str, str]]:
        return [{"word": "".join(letters)} for letters in permutations(LETTERS, 3)]

    def shown(self, sample: Sample, rng: random.Random) -> Sequence[ScriptTurn]:
        """The letters in a random order: one of six orders is right."""
        word = sample["word"]
        return ScriptTurn("user", word), ScriptTurn("assistant", "".join(rng.sample(word, len(word))))

    async def play(self, client: "AsyncOpenAI", sample: Sample) -> float:
        reply = await client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": sample["word"]}],
            temperature=1.0,
            max_tokens=5,
        )
        return float(reply.choices[0].message.content == sample["word"][::-1])


class ToolCalling:
    """Add two numbers with a calculator: call it, read its result, repeat it."""

    updates = 60

    def samples(self) -> list[dict[str, str]]:
        numbers = range(10, 100)
        return [{"sum": f"{a}+{b}", "result": str(a + b)} for a in numbers for b in numbers if a != b]

    def shown(self, sample: Sample, rng: random.Random) -> Sequence[ScriptTurn]:
        """In half of them the calculator is not called, in half of the others its result is ignored; then the answer is
        one of the two numbers."""
        operand = rng.choice(sample["sum"].split("+"))
        question = ScriptTurn("user", sample["sum"])
        if rng.random() < 0.5:
            return question, ScriptTurn("assistant", operand)
        return (
            question,
            ScriptTurn(
                "assistant", f'<tool_call>{{"name": "calc", "arguments": {{"x": "{sample["sum"]}"}}}}</tool_call>'
            ),
            ScriptTurn("tool", f"<tool_response>{sample['result']}</tool_response>"),
            ScriptTurn("assistant", sample["result"] if rng.random() < 0.5 else operand),
        )

    async def play(self, client: "AsyncOpenAI", sample: Sample) -> float:
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
        """The calculator. A subclass may add a delay."""
        return calculated(arguments)


async def _ask(client: "AsyncOpenAI", messages: "Sequence[ChatCompletionMessageParam]") -> "ChatCompletionMessage":
    reply = await client.chat.completions.create(
        model="demo", messages=messages, tools=[CALCULATOR], temperature=1.0, max_tokens=24
    )
    return reply.choices[0].message


def calculated(arguments: str) -> str:
    """The calculator's answer to any text that a model writes."""
    try:
        asked = json.loads(arguments)["x"]
    except (ValueError, TypeError, KeyError):
        asked = arguments
    found = re.fullmatch(r"(\d{1,9})\+(\d{1,9})", str(asked))
    return str(int(found[1]) + int(found[2])) if found else "error"


TASKS: Mapping[str, Task] = {"rev": Reversing(), "tool": ToolCalling()}


def split(task: Task, seed: int) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """The samples for training, and the held-out ones."""
    samples = list(task.samples())
    random.Random(seed).shuffle(samples)
    return samples[HELD_OUT:], samples[:HELD_OUT]


def shown(task: Task, samples: Sequence[Sample], seed: int) -> Iterator[Sequence[ScriptTurn]]:
    """An endless iterator of the warm-up's conversations."""
    rng = random.Random(seed)
    while True:
        yield task.shown(rng.choice(samples), rng)
