"""Which adapter answers the calls of a channel, and whether they are held.

- A channel with an adapter of its own is answered by it. An adapter's name stands for the same weights for ever, so the
  version of every token is certain, whatever happens during the call.
- An agent names the trained model; it cannot name an adapter, so it cannot reach that of another channel.
- While a channel is paused, its new calls wait. Those of other channels do not.
- If the pool cannot be asked for a call's channel, the engines' own weights answer, and the step says so.
"""

import asyncio

from stepwell.engines.engine import DEFAULT_MODEL
from stepwell.errors import EngineUnavailable
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.pool.api.serving_state import ChannelPolicy
from stepwell.pool.client import PoolClient


class ChannelRouting:
    def __init__(self, directory: PoolClient, hold: float) -> None:
        """`hold`: seconds for which a call waits while its channel is paused."""
        self._directory = directory
        self._hold = hold

    async def route(self, call: ModelCall, channel: str, trained_model: str) -> ModelCall:
        """The call to the channel's adapter, as soon as the channel is not paused."""
        policy = await self._policy(channel)
        if not policy.adapter or call.request.get("model") not in (None, DEFAULT_MODEL, trained_model):
            return call
        return call._replace(request={**call.request, "model": policy.adapter}, policy=policy)

    async def _policy(self, channel: str) -> ChannelPolicy:
        serving = self._directory.serving
        if serving is None or not serving.channels:
            return ChannelPolicy(channel)
        try:
            async with asyncio.timeout(self._hold):
                while (policy := serving.channel(channel)).paused:
                    serving = await self._directory.serving_after(serving)
        except TimeoutError:
            raise EngineUnavailable(f"channel {channel!r} has been paused for {self._hold:g} s") from None
        return policy
