"""Steps and rewards arrive."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepwell.common.message_format import message
from stepwell.pool.api.producing import Registration, RewardGiven, SubmitVerdict
from stepwell.pool.shard.operation import Operation, ShardRoute
from stepwell.steps.columns import Columns

if TYPE_CHECKING:
    from stepwell.pool.shard.shard import Shard


@message
@dataclass(frozen=True, slots=True, eq=False)
class AddSteps(Operation[list[SubmitVerdict]]):
    """One verdict for each step."""

    steps: Columns
    channel: str | None = None
    group_size: int | None = None
    route = ShardRoute.GROUP
    is_large = True

    @property
    def nbytes(self) -> int:
        return self.steps.added.nbytes + self.steps.logprobs.nbytes + self.steps.mask.nbytes

    def run(self, shard: "Shard") -> list[SubmitVerdict]:
        shard.transactions.check_room()
        return shard.pool.ingest.submit(self.steps, channel=self.channel, group_size=self.group_size)


@message
@dataclass(frozen=True, slots=True, eq=False)
class AddGroups(Operation[list[SubmitVerdict]]):
    """The trajectories are registered with it. One verdict for each step."""

    steps: Columns
    registrations: Sequence[Registration]
    route = ShardRoute.GROUP
    is_large = True

    @property
    def nbytes(self) -> int:
        return self.steps.added.nbytes + self.steps.logprobs.nbytes + self.steps.mask.nbytes

    def run(self, shard: "Shard") -> list[SubmitVerdict]:
        shard.transactions.check_room()
        return shard.pool.ingest.submit_groups(self.steps, self.registrations)


@message
@dataclass(frozen=True, slots=True)
class GiveReward(Operation[bool]):
    """True if the reward is kept: for training or, if its trajectory was already shipped, in the archive.

    The reward of a step waits until the other gateways of the trajectory have sent what they hold of it.
    """

    reward: RewardGiven
    route = ShardRoute.GROUP

    @property
    def routed_by(self) -> str:
        return self.reward.prompt_uid

    def is_elsewhere(self, shard: "Shard") -> bool:
        return shard.pool.state.is_elsewhere(self.reward.trajectory_uid, self.reward.prompt_uid)

    def run(self, shard: "Shard") -> bool:
        reward, pool = self.reward, shard.pool
        if reward.step_index is not None:
            shard.check_flushed(reward.trajectory_uid, reward.gateway)
        if pool.state.tombstones.has_name(reward.trajectory_uid, reward.prompt_uid):
            return False
        kept, known = pool.ingest.reward(reward), pool.state.trajectories.get(reward.trajectory_uid)
        has_that_of_a_person = known is not None and known.is_relabelled
        return kept or (not has_that_of_a_person and shard.keep_late(reward))
