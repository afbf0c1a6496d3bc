"""Two agents of openai-agents, one of which hands over to the other: their calls are one trajectory."""

import asyncio
import os

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import AgentsException
from openai import AsyncOpenAI

import stepwell

REQUEST = "My kettle leaks. It came with order 4711, and I want my money back."


def make_desk(client: AsyncOpenAI, refunded: list[int]) -> Agent:
    model = OpenAIChatCompletionsModel(model="default", openai_client=client)

    @function_tool
    def refund(order: int) -> str:
        """Pay the price of an order back."""
        refunded.append(order)
        return f"order {order} was refunded"

    refunds = Agent(
        name="refunds",
        handoff_description="Pays money back.",
        instructions="Refund the order that the customer names, then say so.",
        model=model,
        tools=[refund],
    )
    return Agent(
        name="desk",
        instructions="You answer questions about the shop. Hand over to refunds whoever wants money back.",
        model=model,
        handoffs=[refunds],
    )


async def main() -> None:
    set_tracing_disabled(True)  # otherwise what is said here is sent to OpenAI
    run = stepwell.connect(os.environ["STEPWELL_URL"], key=os.environ["STEPWELL_KEY"])
    for _ in range(4):
        refunded: list[int] = []
        async with run.trajectory(prompt_uid="kettle", group_size=4) as t:
            desk = make_desk(AsyncOpenAI(base_url=t.base_url, api_key=t.api_key), refunded)
            try:
                end = await Runner.run(desk, REQUEST, max_turns=6)
                said = f"{end.last_agent.name}: {end.final_output}"
            except AgentsException as failure:  # too many turns, or a call of a tool that there is not
                said = f"failed: {failure}"
            t.reward = float(refunded == [4711])
        print(f"reward {t.reward}  {said}")


if __name__ == "__main__":
    asyncio.run(main())
