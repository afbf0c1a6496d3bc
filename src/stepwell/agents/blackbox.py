"""Black-box agents: anything that takes a base_url and a key.

    async def agent(rollout):
        client = AsyncOpenAI(base_url=rollout.base_url, api_key=rollout.api_key)
        ...
        return 1.0

    flow = BlackBoxAgentFlow("http://127.0.0.1:8100", agent)

An agent that is not a coroutine runs in its own thread. Python cannot end a thread: after the timeout it keeps running,
but its trajectory accepts no more calls.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from stepwell.agents.rollout import AgentFlow, Rollout
from stepwell.common.async_calls import call

Agent: TypeAlias = Callable[[Rollout], float | None] | Callable[[Rollout], Awaitable[float | None]]


class BlackBoxAgentFlow(AgentFlow):
    def __init__(self, gateway: str, agent: Agent, **settings: Any) -> None:
        """`settings` are the arguments of every AgentFlow, such as `key`, `channel`, `group_size` and `timeout`."""
        super().__init__(gateway, **settings)
        self.agent = agent

    async def run(self, rollout: Rollout) -> float | None:
        return await call(self.agent, rollout)
