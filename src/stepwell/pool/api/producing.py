"""What producers and gateways tell the pool, and what it answers.

Registrations, steps, rewards, calls that are under way; and how many rollouts may start, so that none becomes too stale
before it is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

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
    """The tokens of the step's prompt and of its response."""
    finish_reason: str | None
    lineage: JsonObject
    others: tuple[str, ...] = ()
    """The uids of the other choices of its call."""


TELL_CALLS = "@tell-calls"
"""Among the trajectories that a gateway is asked to flush: it tells of all calls whose steps the pool may lack."""


@sent
class Repeats(StrEnum):
    """Which earlier calls a call repeats, of those with its key: their answers were not read."""

    NONE = "none"
    LOST = "lost"
    """The call repeats only calls that are lost, for example because their gateway died. Any other call may have been
    asked the same on purpose."""
    ALL = "all"


@message
@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call whose answer will be a step of a trajectory."""

    trajectory_uid: str
    prompt_uid: str
    uid: str
    """Also that of its first step."""
    gateway: str = ""
    key: str = ""
    """The same for calls that ask the same; empty if that is not known."""
    repeats: Repeats = Repeats.NONE
    began_at: float = 0.0
    """By its gateway's clock. Announcements of two gateways may arrive in another order."""


class HeldCalls(NamedTuple):
    """What a gateway knows of its calls."""

    calls: Sequence[CallBegun] = ()
    """All whose steps the pool may lack."""
    missed: int = 0
    """How often the pool has not taken word of a call so far."""
    is_late: bool = False
    """The pool is away, or an answer has waited for some time until the pool knows of its call."""


@message
class Requests(NamedTuple):
    """What a shard asks a gateway for."""

    trajectory_uids: Sequence[str]
    """It sends what it holds of these."""
    pause: float
    """Seconds after which it shows at the latest that it lives. Before, if the shard posts its topic."""


@message
@dataclass(frozen=True, slots=True)
class Refill:
    """A group whose deadline has passed, and how many more rollouts it needs."""

    prompt_uid: str
    missing: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    batch: int
    """Trajectories per training step: as configured, or as in the last fetch; 0 while unknown."""
    batches_ahead: int | None
    """How many batches may be in progress: one, and one more per version of allowed staleness; None if data may be of
    any age."""
    in_flight: int
    """Trajectories that are not complete."""
    queued: int
    """Complete trajectories that wait for the trainer."""
    refills: tuple[Refill, ...] = ()
    group_deadline: float | None = None
    missing: tuple[str, ...] = ()
    """Shards that did not answer. Their last known numbers are counted."""

    @property
    def may_start(self) -> int | None:
        """New trajectories that may start now; None if any number may: the batch size is not known yet, or data may be
        of any age."""
        if self.batch == 0 or self.batches_ahead is None:
            return None
        return max(0, self.batch * self.batches_ahead - self.in_flight - self.queued)

    @property
    def waits_for(self) -> str:
        """In words, why no trajectory may start; empty if one may."""
        if self.may_start != 0 or self.batches_ahead is None:
            return ""
        return (
            f"{self.queued} complete rollouts wait for the trainer and {self.in_flight} run; together they may be "
            f"{self.batch * self.batches_ahead}: {self.batch} a batch, with max_staleness {self.batches_ahead - 1}"
        )


def merge_pacing(parts: Sequence[Pacing], batch_size: int | None, missing: tuple[str, ...] = ()) -> Pacing:
    """The pool's pacing from its shards'. A configured batch size is that of the whole pool."""
    return Pacing(
        batch=batch_size or sum(part.batch for part in parts),
        batches_ahead=parts[0].batches_ahead,
        in_flight=sum(part.in_flight for part in parts),
        queued=sum(part.queued for part in parts),
        refills=tuple(refill for part in parts for refill in part.refills),
        group_deadline=parts[0].group_deadline,
        missing=missing,
    )
