"""What PoolState writes down with every change, so that another process can continue after a kill."""

from collections.abc import Iterator, Sequence
from typing import Any

from stepwell.pool.api.leasing import Settlement
from stepwell.pool.api.policy import PolicyDecision
from stepwell.pool.state.records import Group, Lease, Trajectory
from stepwell.pool.state.stored_step import StoredStep
from stepwell.pool.state.tombstones import Tombstone
from stepwell.steps.prefix_tree import Placement


class StateJournal:
    """PoolState calls it with every change, in order. This one keeps nothing: the pool is lost with its process."""

    def save_group(self, group: Group) -> None: ...

    def save_trajectory(self, trajectory: Trajectory) -> None: ...

    def add_step(self, trajectory: Trajectory, step: StoredStep, placement: Placement | None) -> None:
        """A quarantined step has no placement: its tokens are not kept."""

    def save_step(self, step: StoredStep) -> None:
        """Its reward, its lease or its `shipped` flag has changed."""

    def remove_trajectory(self, trajectory: Trajectory) -> None: ...

    def remove_group(self, group: Group) -> None:
        """With all its trajectories and steps."""

    def retire_group(self, group: Group) -> None:
        """It is trained and no longer needed: it may move to the archive. After that it is dissolved."""
        group.dissolve()

    def add_closed(self, trajectory_uid: str, revision: int, subject: str = "") -> None:
        """The trajectory is gone. Called again with a higher revision for each later reward. `subject` is the digest of
        its subject, if it has one."""

    def save_tombstone(self, tombstone: Tombstone) -> None:
        """Nothing of a subject is taken any more, or more of its data is removed."""

    def add_refused_names(self, digests: Sequence[str]) -> None:
        """Nothing is taken any more of trajectories and sessions whose names have these digests."""

    def remove_closed(self, subject: str, trajectory_uids: Sequence[str]) -> None:
        """Closed trajectories of a subject, by its digest and by their uids."""

    def save_lease(self, lease: Lease) -> None: ...

    def end_lease(self, lease: Lease, how: Settlement) -> None:
        """The lease is over. How it ended is kept for a while: a consumer that lost the answer asks again."""

    def add_ended(self, lease_uid: str, how: Settlement) -> None:
        """How a lease ended, or a decision over the leases of a batch."""

    def save_acknowledged(self, decision_uid: str) -> None:
        """A batch of several shards is acknowledged, and some may not know it yet."""

    def remove_acknowledged(self, decision_uid: str) -> None:
        """All of them know it."""

    def add_lineage(self, lease: Lease, at: float) -> None:
        """The lease is acknowledged. Its groups still have their steps."""

    def add_version(self, version: int, at: float) -> None:
        """The pool serves this version of the policy from now on."""

    def save_decisions(self, decisions: Sequence[PolicyDecision]) -> None:
        """All that are kept, about versions of the policy."""

    def save_row(self, name: str, key: str, value: object) -> None:
        """JSON of a slice, by the name of the slice and a key. It replaces an earlier row with this key."""

    def remove_row(self, name: str, key: str) -> None: ...

    def rows_of(self, name: str) -> Iterator[tuple[str, Any]]:
        """The committed rows of a slice: each with its key, the oldest first."""
        return iter(())
