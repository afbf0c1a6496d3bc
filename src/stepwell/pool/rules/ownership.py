"""Which groups a shard may open, and which it only keeps until they leave the pool, after the shards have changed.

Clients ask the shards of former layouts first. So before a group of a prompt is opened by the present layout, every
shard that could have one of that prompt has said that nothing can join it there.
"""

from itertools import chain

from stepwell.pool.state.pool_state import PoolState


class Ownership:
    def __init__(self, state: PoolState) -> None:
        self._state = state

    def is_elsewhere(self, trajectory_uid: str, prompt_uid: str, opens_in: str | None = None) -> bool:
        """Must another shard be asked for this trajectory? `opens_in` is the channel in which it may be opened."""
        state = self._state
        if len(state.layouts) < 2 or self.is_own(prompt_uid):
            return False
        if any(trajectory_uid in known for known in (state.trajectories, state.closed, state.history)):
            return False
        channel = None if opens_in is None else state.channels.get(opens_in)
        return channel is None or channel.joinable(prompt_uid) is None

    def misplaced(self) -> int:
        """Groups that are here because of a former layout."""
        state = self._state
        queued = chain.from_iterable(channel.groups.values() for channel in state.channels.values())
        leased = chain.from_iterable(lease.groups for lease in state.leases.values())
        return sum(not self.is_own(group.prompt_uid) for group in chain(queued, leased))

    def is_own(self, prompt_uid: str) -> bool:
        """By the present layout, may this shard open groups of the prompt?"""
        return self._state.layouts[-1].owner(prompt_uid) == self._state.shard
