"""A graph of LangGraph's, a model and its tools in a loop: the attempts at each question run at the same time."""

import asyncio
import os
from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

import stepwell

STOCK = {"tea": 12, "rice": 0, "salt": 31}
ATTEMPTS = 4


def in_stock(item: str) -> str:
    """How many packets of an item there are."""
    return f"{item}: {STOCK[item]}" if item in STOCK else f"there is no item {item!r}; there are {', '.join(STOCK)}"


def make_graph(base_url: str, api_key: str) -> Any:
    chat = ChatOpenAI(model="default", base_url=base_url, api_key=api_key, max_tokens=512)
    model = chat.bind_tools([in_stock])

    async def call_model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("tools", ToolNode([in_stock]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


async def attempt(run: stepwell.Run, item: str) -> str:
    question = f"How many packets of {item} do we have?"
    async with run.trajectory(prompt_uid=f"stock-{item}", group_size=ATTEMPTS) as t:
        graph = make_graph(t.base_url, t.api_key)
        end = await graph.ainvoke({"messages": [{"role": "user", "content": question}]}, {"recursion_limit": 9})
        text = end["messages"][-1].text
        t.reward = float(str(STOCK[item]) in text)
    return f"{question}  reward {t.reward}  {text}"


async def main() -> None:
    run = stepwell.connect(os.environ["STEPWELL_URL"], key=os.environ["STEPWELL_KEY"])
    for item in ("tea", "salt"):
        for line in await asyncio.gather(*(attempt(run, item) for _ in range(ATTEMPTS))):
            print(line)


if __name__ == "__main__":
    asyncio.run(main())
