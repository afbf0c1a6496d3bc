"""What a pool writes down as it changes, so that another process can take over where it was killed."""

from typing import Protocol

from stepwell.pool.api.curation import AuditEntry
from stepwell.pool.api.leasing import Settlement
from stepwell.pool.state.records import Group, Lease, Trajectory
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.prefix_tree import Placement


class StateJournal(Protocol):
    """Told of every change in the order it happens. Whoever drives the pool commits once a message."""

    def save_group(self, group: Group) -> None: ...

    def save_trajectory(self, trajectory: Trajectory) -> None: ...

    def add_step(self, trajectory: Trajectory, step: StoredStep, placement: Placement | None) -> None:
        """A quarantined step has no placement: only that it was there is kept."""

    def save_step(self, step: StoredStep) -> None:
        """Its reward, its lease, or whether it was shipped has changed."""

    def remove_trajectory(self, trajectory: Trajectory) -> None: ...

    def remove_group(self, group: Group) -> None:
        """With all that is in it."""

    def retire_group(self, group: Group) -> None:
        """It was trained and is needed no more: it may leave for the archive, and is then dissolved."""

    def add_closed(self, trajectory_uid: str, revision: int) -> None:
        """It is gone, and so many rewards were given to it; told again when one more is."""

    def save_lease(self, lease: Lease) -> None: ...

    def end_lease(self, lease: Lease, how: Settlement) -> None:
        """It is over. How is kept for a while: whoever ended it may not have got the answer, and asks again."""

    def add_audit(self, entry: AuditEntry) -> None:
        """A person's decision. These are kept for good."""


class NoJournal:
    """For a pool that may be lost with its process."""

    def save_group(self, group: Group) -> None:
        pass

    def save_trajectory(self, trajectory: Trajectory) -> None:
        pass

    def add_step(self, trajectory: Trajectory, step: StoredStep, placement: Placement | None) -> None:
        pass

    def save_step(self, step: StoredStep) -> None:
        pass

    def remove_trajectory(self, trajectory: Trajectory) -> None:
        pass

    def remove_group(self, group: Group) -> None:
        pass

    def retire_group(self, group: Group) -> None:
        group.dissolve()

    def add_closed(self, trajectory_uid: str, revision: int) -> None:
        pass

    def save_lease(self, lease: Lease) -> None:
        pass

    def end_lease(self, lease: Lease, how: Settlement) -> None:
        pass

    def add_audit(self, entry: AuditEntry) -> None:
        pass
