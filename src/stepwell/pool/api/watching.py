"""What the pool shows to watchers: snapshots of trajectories.

- Reading changes nothing.
- A watcher asks for what changed since its last request, and keeps its own list. The cost to the pool does not grow
  with the length of the queue.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from stepwell.common.message_format import message, sent
from stepwell.steps.step import Exactness

ROLLOUTS, REWARD = "rollouts", "reward"
"""What a group that is not ready waits for: the cause of the state WAITING."""
MARKS = "marks"
"""The key of a trajectory's metadata that holds its marks. Trainers and exports read them there."""
BY_A_PERSON = "curation:"
"""The start of the source of a reward that a person gave. The person's name follows."""


@sent
class TrajectoryState(StrEnum):
    OPEN = "open"
    """Its rollout is running."""
    WAITING = "waiting"
    """It is complete, and its group is not ready. The cause says what is missing: rollouts, reward."""
    READY = "ready"
    LEASED = "leased"
    """A trainer has it and has not acknowledged it yet."""
    TRAINED = "trained"
    """Acknowledged. If the trainer's step filter left all of it out, the cause says why."""
    DROPPED = "dropped"
    """It is never trained. The cause is the ledger's: evicted, aborted, empty, deadline, stale, reward_failed, cleared,
    rejected, rolled_back."""


class TrajectorySnapshot(NamedTuple):
    """One trajectory in plain values. A tuple, because the pool makes one for every trajectory that leaves it."""

    trajectory_uid: str
    prompt_uid: str
    channel: str
    source: str
    group: int
    """The group's seq in its shard."""
    group_size: int
    state: TrajectoryState
    cause: str = ""
    steps: int = 0
    """Quarantined ones included."""
    quarantined: int = 0
    untrainable: int = 0
    tokens: int = 0
    response_tokens: int = 0
    reward: float | None = None
    """Its return: the outcome reward and the rewards of all steps."""
    reward_source: str = ""
    oldest_version: int | None = None
    newest_version: int | None = None
    exactness: Exactness | Literal[""] = ""
    """The lowest grade among its steps; empty without steps."""
    marks: tuple[str, ...] = ()
    started_at: float = 0.0
    """When its group was opened, by the pool's clock."""
    changed_at: float = 0.0
    note: str = ""
    """Details of the cause: how old it was, who rejected it and why."""
    position: int = 0
    """In the change log. For the shard alone, as is the revision."""
    revision: int = 0
    """The number of the last reward given to it."""
    remark: str = ""
    """What slices say of it while it is held, in sentences."""
    kept: str = ""
    """Why its group is neither evicted nor stale, in a few words; empty if nothing keeps it."""
    shard: str = ""
    """The client fills it in: a shard sends the fields before it, as a plain tuple."""

    def public(self) -> dict[str, object]:
        """The fields that are shown to people."""
        fields = self._asdict()
        del fields["position"], fields["revision"]
        return fields


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far a watcher has read in one shard. A restarted shard begins a new epoch and is read from the start."""

    epoch: str = ""
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Snapshots of the trajectories that changed since the cursors. Oldest change first, each trajectory once."""

    snapshots: Sequence[TrajectorySnapshot]
    cursors: Mapping[str, Cursor]
    """By shard, for the next request."""
    reset_shards: Sequence[str] = ()
    """These shards are read from the start: what the watcher knew of them is void."""
    more: bool = False
    """There are more changes now: ask again at once."""
    missing: tuple[str, ...] = ()
    """Shards that did not answer. Their cursors stand where they were."""


@message
class ChangesPage(NamedTuple):
    """One shard's answer to a watcher."""

    snapshots: Sequence[tuple[object, ...]]
    """Plain tuples: they are much cheaper to pickle than TrajectorySnapshots."""
    cursor: Cursor
    reset: bool
    more: bool
