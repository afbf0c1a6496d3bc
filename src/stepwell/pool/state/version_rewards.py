"""What the versions of the policy earned: the first reward of each rewarded step and trajectory, in order.

- The last rewards of each channel are kept, in memory. After a restart the list begins empty.
- The journal keeps how many there were, so a reader learns how many it missed, and reads none twice.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import islice

from stepwell.pool.api.policy import VERSION_REWARDS_KEPT, RewardTally, VersionReward, tally_rewards


class VersionRewardLog:
    def __init__(self, kept: int = VERSION_REWARDS_KEPT) -> None:
        self.counts: dict[str, int] = {}
        """All rewards that there ever were, by channel."""
        self._kept = kept
        self._rewards: dict[str, deque[VersionReward]] = {}

    def recall(self, counts: Mapping[str, int]) -> None:
        """After a restart."""
        self.counts = dict(counts)

    def add(self, channel: str, reward: VersionReward) -> None:
        self.counts[channel] = self.counts.get(channel, 0) + 1
        self._rewards.setdefault(channel, deque(maxlen=self._kept)).append(reward)

    def drop_names(self, trajectory_uids: Collection[str]) -> None:
        """The rewards stay, without the name of their trajectory."""
        for channel, rewards in self._rewards.items():
            if any(reward.trajectory_uid in trajectory_uids for reward in rewards):
                kept = (replace(r, trajectory_uid="") if r.trajectory_uid in trajectory_uids else r for r in rewards)
                self._rewards[channel] = deque(kept, maxlen=self._kept)

    def end(self, channel: str) -> int:
        """The position after the last reward."""
        return self.counts.get(channel, 0)

    def first(self, channel: str) -> int:
        """The position of the first reward that is kept."""
        return self.end(channel) - len(self._rewards.get(channel, ()))

    def since(self, channel: str, position: int) -> list[VersionReward]:
        """The rewards from that position on, as far as they are kept."""
        skipped = max(0, position - self.first(channel))
        return list(islice(self._rewards.get(channel, ()), skipped, None))

    def tallies(self, channel: str) -> dict[int, RewardTally]:
        """By version."""
        return tally_rewards(self._rewards.get(channel, ()))
