"""What a version of the policy said that was refused or rolled back is not trained.

Its log-probabilities are recorded, so a trainer could correct for them. But what a bad policy says is not worth
learning. A step of it is dropped when its turn comes. In a batch of groups or trajectories its whole trajectory is
dropped, because the bad version has a part in its outcome. The rest of a group remains.
"""

from collections.abc import Collection, Iterable

from stepwell.pool.state.records import Group, Trajectory
from stepwell.pool.state.stored_step import StoredStep

ROLLED_BACK = "rolled_back"
"""The cause under which such steps are counted."""


def is_withdrawn(steps: Iterable[StoredStep], versions: Collection[int]) -> bool:
    """Did one of these versions say a token of these steps?"""
    return any(_said_by(step, versions) for step in steps) if versions else False


def rest_of(group: Group, versions: Collection[int]) -> list[Trajectory]:
    """The trajectories of which none of these versions said anything."""
    return [found for found in group.trajectories.values() if not is_withdrawn(found.held_steps(), versions)]


def _said_by(step: StoredStep, versions: Collection[int]) -> bool:
    if not step.version_spans:
        return step.policy_version in versions
    return any(span.version in versions for span in step.version_spans)
