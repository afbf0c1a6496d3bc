"""Agents for an engine without a model: two turns of small talk, and every other rollout counts as right.

python -m benchmarks.trainers_rig.short_agents ORDERS
"""

import asyncio
import sys
from itertools import count
from typing import TYPE_CHECKING

from stepwell import logs
from stepwell.demo.agent_process import Orders, serve
from stepwell.demo.tasks import Sample, ToolCalling

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessageParam


class SmallTalk(ToolCalling):
    def __init__(self) -> None:
        self._played = count()

    async def play(self, client: "AsyncOpenAI", sample: Sample) -> float:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": sample["sum"]}]
        for _ in range(2):
            reply = await client.chat.completions.create(
                model="tiny", messages=messages, temperature=1.0, max_tokens=16
            )
            messages += [
                {"role": "assistant", "content": reply.choices[0].message.content},
                {"role": "user", "content": sample["result"]},
            ]
        return float(next(self._played) % 2)


if __name__ == "__main__":
    logs.setup(json=False)
    asyncio.run(serve(Orders.from_json(sys.argv[1]), SmallTalk()))
