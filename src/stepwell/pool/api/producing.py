"""What producers send to the pool, and what the pool answers them."""

from dataclasses import dataclass
from enum import StrEnum

from stepwell.common.message_format import message, sent
from stepwell.steps.returns import GivenReward
from stepwell.steps.step import IntArray, JsonObject

TRAIN = "train"
"""The default channel."""
ENDED_BY = "ended_by"
"""In a trajectory's metadata: the failure of the policy that ended it, `idle`, or `deadline`."""
DEADLINE = "deadline"
"""Why the pool ended a rollout that was open at its group's deadline, or dropped it."""
UNFINISHED_REWARD = "unfinished_reward"
"""In a trajectory's metadata: its reward if it is open at its group's deadline."""

READ, CONTINUED = "read", "continued"
"""Marks of steps that are trained: somebody read the answer, or continued this one of its choices. Other marks are
UNSEEN and NOT_CONTINUED of steps/trainable.py."""


@dataclass(frozen=True, slots=True)
class TrajectoryRef:
    """A trajectory as its URL names it."""

    trajectory_uid: str
    prompt_uid: str


@sent
class SubmitVerdict(StrEnum):
    """The pool's answer to one submitted step."""

    ACCEPTED = "accepted"
    QUARANTINED = "quarantined"
    DUPLICATE = "duplicate"
    LATE = "late"
    """Its trajectory is already shipped or dropped, or it was completed before the step's call began."""
    UNKNOWN = "unknown"
    """No trajectory of that prompt_uid is registered under this uid."""
    MIXED_INDEXES = "mixed_indexes"
    """Either its producer sets step_index and the trajectory's other steps have none, or the other way round."""
    FULL = "full"
    """The channel is full and refuses new data. The step may be sent again later."""
    TOO_LARGE = "too_large"
    """With it, its trajectory would hold more than its share of the channel."""
    DELETED = "forgotten"
    """The data of its subject was deleted."""
    ELSEWHERE = "elsewhere"
    """Another shard has the trajectory, or may open it. The client asks that one; no producer gets this verdict."""


@sent
class EndResult(StrEnum):
    """What became of a trajectory that its producer ended."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    EMPTY = "empty"
    """No call of it was recorded, or none that is sound and it has no reward. It is dropped, and another rollout can
    take its place in the group."""
    LATE = "late"
    """It was already shipped or dropped."""


@message
@dataclass(frozen=True, slots=True)
class Registration:
    """What is known about a trajectory before its first step. None keeps the present value, or takes the default."""

    trajectory_uid: str
    prompt_uid: str
    channel: str | None = None
    group_size: int | None = None
    metadata: JsonObject | None = None
    source: str | None = None
    """Where the group's rollouts come from. It counts only for the trajectory that opens the group."""
    outcome: GivenReward | None = None
    """The outcome reward of a trajectory that has already ended, elsewhere. It counts only if the trajectory is new."""
    gateway: str = ""
    """The gateway that serves the trajectory; empty if none does."""
    opens: bool = True
    """False: a trajectory that is not there is refused, as UnknownTrajectory."""


LAST_STEP = -1
"""The step_index of a reward for the last step that the trajectory has when the reward comes."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardGiven:
    """A reward for a trajectory, or for its step with that index, or for its last one (LAST_STEP).

    A later one replaces it until the data is shipped. After that, only an archive keeps it. One that comes while a
    trainer has the data under a lease is in the archive too, and counts if the data comes back.
    """

    trajectory_uid: str
    prompt_uid: str
    value: float
    source: str = ""
    step_index: int | None = None
    notes: str = ""
    """The reason, in words."""
    gateway: str = ""
    """The gateway that sends it. The step may be at another one, which is asked for it."""


FLUSH_WAIT = 25.0
"""Seconds that a completion, or the reward of a step, waits for the steps that other gateways hold."""


SCRUB_SPOOL = "@scrub-spool"
"""Among the trajectories that a gateway is asked to flush: it sends all that it holds, and then removes from its
spool's file what is left there of deleted steps."""


@sent
class FlushNeeded(Exception):
    """Another gateway may hold steps of a trajectory, and must send them first."""

    def __init__(self, trajectory_uid: str, gateway: str) -> None:
        """`gateway` is the one that asks."""
        super().__init__(trajectory_uid, gateway)
        self.trajectory_uid = trajectory_uid
        self.gateway = gateway


@message
@dataclass(frozen=True, slots=True, eq=False)
class RecordedTurn:
    """A step, as far as a call that continues its conversation needs it."""

    uid: str
    tokens: IntArray
    """Of its prompt and its response."""
    finish_reason: str | None
    lineage: JsonObject
    others: tuple[str, ...] = ()
    """The uids of the other choices of its call."""
