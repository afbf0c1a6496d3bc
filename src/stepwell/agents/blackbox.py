"""Black-box agents: anything that takes a base_url and a key.

    async def agent(rollout):
        client = AsyncOpenAI(base_url=rollout.base_url, api_key=rollout.api_key)
        ...
        return 1.0

    flow = BlackBoxAgentFlow("http://127.0.0.1:8100", agent)

An agent that is not a coroutine runs in its own thread. Python cannot end a thread: after the timeout it keeps running,
but its trajectory accepts no more calls.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

from stepwell.agents.gateway_client import PATIENCE
from stepwell.agents.outcome import AgentFailure
from stepwell.agents.rollout import NO_REWARDS, AgentFlow, Rollout
from stepwell.common.async_calls import call
from stepwell.pool.api.producing import TRAIN

Agent: TypeAlias = Callable[[Rollout], float | None] | Callable[[Rollout], Awaitable[float | None]]


class BlackBoxAgentFlow(AgentFlow):
    def __init__(
        self,
        gateway: str,
        agent: Agent,
        *,
        key: str | None = None,
        channel: str = TRAIN,
        group_size: int = 8,
        timeout: float = 600.0,
        patience: float = PATIENCE,
        failure_rewards: Mapping[AgentFailure, float] = NO_REWARDS,
        retry_on: tuple[type[BaseException], ...] = (),
    ) -> None:
        super().__init__(
            gateway,
            key=key,
            channel=channel,
            group_size=group_size,
            timeout=timeout,
            patience=patience,
            failure_rewards=failure_rewards,
            retry_on=retry_on,
        )
        self.agent = agent

    async def run(self, rollout: Rollout) -> float | None:
        return await call(self.agent, rollout)
