"""How the guard, people and watchers reach what the pool knows of the policy's versions.

The first shard has the canary and the decisions. Each shard has the rewards of its own groups.
"""

import asyncio
from typing import TYPE_CHECKING

from stepwell.pool.api.policy import (
    Canary,
    PolicyDecision,
    PolicyStatus,
    RewardTally,
    ShardRewards,
    VersionRewards,
)
from stepwell.pool.api.producing import TRAIN
from stepwell.pool.api.serving_state import ChannelPolicy, Serving
from stepwell.pool.client.asking import AskingClient
from stepwell.pool.client.watching import WATCH_TIMEOUT
from stepwell.pool.slices.channels import PauseChannel

if TYPE_CHECKING:
    from stepwell.pool.shard.service import ShardService

FROM_THE_START = ":0"
"""The cursor of a shard that was not there when the others' were given."""
FROM_NOW_ON = ""
"""The cursor of a shard that did not answer when the first ones were given."""


class PolicyClient(AskingClient):
    async def canary(self) -> Canary | None:
        """The newer version that a share of the sessions gets, as the pool knows it now."""
        return (await self.newest_serving()).canary

    async def newest_serving(self) -> Serving:
        """As the pool has it now; `serving` is what it last reported."""
        return await self.shards.at(self.shards.pool).serving()

    async def channel_policy(self, channel: str) -> ChannelPolicy:
        """What serves the calls of a channel now."""
        return (await self.newest_serving()).channel(channel)

    async def set_adapter(self, channel: str, adapter: str, version: int) -> None:
        """Gateways hear of it last: no step of an adapter gets to a shard that does not know its version.
        PoolUnavailable if a shard is away: then calls go on with the adapter before."""
        first = self.shards.pool
        others = [self.shards.at(name) for name in await self.shards.names() if name != first]
        await asyncio.gather(*(shard.set_adapter(channel, adapter, version) for shard in others))
        await self.shards.at(first).set_adapter(channel, adapter, version)

    async def pause_channel(self, channel: str, *, paused: bool) -> None:
        await self.ask(PauseChannel(channel, paused))

    async def decisions(self) -> list[PolicyDecision]:
        """The last ones about versions of the policy, the oldest first."""
        return await self.shards.at(self.shards.pool).decisions()

    async def version_rewards(self, channel: str, cursor: dict[str, str] | None = None) -> VersionRewards:
        """What was rewarded since the cursor; without one, only where the rewards end now. A shard that does not answer
        is read later."""
        given = cursor or {}

        async def ask(name: str, shard: "ShardService") -> ShardRewards:
            since = None if cursor is None else given.get(name, FROM_THE_START) or None
            return await shard.version_rewards(channel, since)

        answer = await self.shards.ask_each(ask, timeout=WATCH_TIMEOUT)
        ends = {name: part.cursor for name, part in answer.by_shard.items()}
        away = {name: given.get(name, FROM_NOW_ON if cursor is None else FROM_THE_START) for name in answer.missing}
        return VersionRewards(
            rewards=[reward for part in answer.parts for reward in part.rewards],
            cursor=away | ends,
            missed=sum(part.missed for part in answer.parts),
        )

    async def policy_status(self, channel: str = TRAIN) -> PolicyStatus:
        """With what the versions earned in that channel lately."""
        first_shard = self.shards.at(self.shards.pool, timeout=WATCH_TIMEOUT)
        serving, decisions, (rewards, missing) = await asyncio.gather(
            first_shard.serving(), first_shard.decisions(), self._reward_tallies(channel)
        )
        return PolicyStatus(
            policy_version=serving.policy_version,
            canary=serving.canary,
            withdrawn=serving.withdrawn,
            decisions=decisions,
            rewards=rewards,
            missing=missing,
        )

    async def _reward_tallies(self, channel: str) -> tuple[dict[int, RewardTally], tuple[str, ...]]:
        """By version, and the shards that did not answer."""
        answer = await self.shards.ask_each(lambda _, shard: shard.reward_tallies(channel), timeout=WATCH_TIMEOUT)
        tallies: dict[int, RewardTally] = {}
        for part in answer.parts:
            for version, tally in part.items():
                tallies[version] = tallies.get(version, RewardTally()) + tally
        return dict(sorted(tallies.items())), answer.missing
