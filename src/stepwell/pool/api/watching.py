"""What the pool shows to watchers: snapshots of trajectories, and why one is not trained, in a sentence or two.

- Reading changes nothing.
- A watcher asks for what changed since its last request, and keeps its own list. The cost to the pool does not grow
  with the length of the queue.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from stepwell.common.message_format import message, sent
from stepwell.pool.api.plan import Limits, OnIncomplete
from stepwell.pool.api.staleness import Present, consequence_of
from stepwell.steps.step import BoolArray, Exactness, VersionSpan
from stepwell.steps.trainable import (
    INCOMPLETE,
    NO_CONSENT,
    NO_SOUND_STEP,
    NOT_CONTINUED,
    OTHER_MODEL,
    TOO_INEXACT,
    UNSEEN,
)

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


def why_not_trained(snapshot: TrajectorySnapshot, limits: Limits, present: Present) -> str:
    """Empty if it is trained."""
    if snapshot.state is TrajectoryState.TRAINED:
        return _left_out(snapshot)
    if snapshot.state is TrajectoryState.DROPPED:
        said = DROPPED.get(snapshot.cause)
        return said(snapshot, limits) if said else f"It was dropped: {snapshot.cause or 'no cause is known'}."
    age = f"Its group is neither evicted nor stale: {snapshot.kept}." if snapshot.kept else ""
    age = age or _is_too_old(snapshot, limits, present)
    return " ".join(filter(None, (_waits(snapshot, limits), _lacks_calls(snapshot, limits), snapshot.remark, age)))


def _waits(snapshot: TrajectorySnapshot, limits: Limits) -> str:
    if snapshot.state is TrajectoryState.OPEN:
        started = "" if snapshot.steps else " and has no step yet"
        return f"Its rollout is still running{started}: it waits to be completed."
    if snapshot.state is TrajectoryState.LEASED:
        return "A trainer has it and has not acknowledged it yet. Without an acknowledgement it comes back."
    if snapshot.state is TrajectoryState.READY:
        return "It is ready and waits for a trainer."
    if snapshot.cause == REWARD:
        own = "It waits for a reward" if snapshot.reward is None else "Its group waits for rewards"
        return f"{own}: with require_reward, unscored data is not handed out."
    within = "" if limits.group_deadline is None else f", {limits.group_deadline:g} s after the first at the latest"
    return f"It is complete. Its group of {snapshot.group_size} still waits for other rollouts{within}."


def _lacks_calls(snapshot: TrajectorySnapshot, limits: Limits) -> str:
    if not snapshot.note.startswith(INCOMPLETE) or limits.on_incomplete is OnIncomplete.KEEP:
        return ""
    return f"It is {snapshot.note}, with the gateway that answered: it is left out, unless what is missing still comes."


@dataclass(slots=True)
class _OldestTokens:
    """The oldest tokens of a trajectory, as a snapshot knows them: not younger than they are."""

    oldest_version: int
    started_at: float
    response_length: int = 0
    mask: BoolArray | None = None
    version_spans: tuple[VersionSpan, ...] = ()


def _is_too_old(snapshot: TrajectorySnapshot, limits: Limits, present: Present) -> str:
    """Says what becomes of a held trajectory because of its age."""
    if snapshot.oldest_version is None or snapshot.state is TrajectoryState.LEASED:
        return ""
    consequence = consequence_of(limits)
    oldest = _OldestTokens(snapshot.oldest_version, snapshot.started_at)
    distance = consequence.distance.of_oldest((oldest,), present) or 0
    what_happens = consequence.explain(distance)
    if not what_happens:
        return ""
    told = consequence.distance.words(distance)
    return f"Its oldest token is {told}, and max_staleness is {limits.max_staleness}: {what_happens}."


def _left_out(snapshot: TrajectorySnapshot) -> str:
    if snapshot.cause == TOO_INEXACT:
        return f"The trainer left all of it out: its exactness, {snapshot.exactness}, is lower than requested."
    marked = f"The trainer left all of it out: its steps are marked untrainable, as {snapshot.cause}."
    return LEFT_OUT.get(snapshot.cause, marked) if snapshot.cause else ""


LEFT_OUT: Mapping[str, str] = {
    OTHER_MODEL: "The trainer left all of it out: another model or adapter wrote it than the one that is trained.",
    NO_CONSENT: "No trainer gets it: whose data it is did not agree to training.",
    UNSEEN: "No trainer gets it: nobody read its answers to their end. Its reward counted in its group.",
    INCOMPLETE: "No trainer gets it: a call of it is missing, because its gateway died or gave the call's step up.",
    NOT_CONTINUED: "No trainer gets it: other choices of its answers were continued. Its reward counted in its group.",
    NO_SOUND_STEP: "No sound step of it was recorded. Its reward counted in its group.",
}
"""By what its steps are marked with, or why they were left out."""


def _deadline(snapshot: TrajectorySnapshot, limits: Limits) -> str:
    within = "" if limits.group_deadline is None else f" of {limits.group_deadline:g} s"
    return f"Its group was not complete within its deadline{within}; it was dropped for that reason."


def _evicted(snapshot: TrajectorySnapshot, limits: Limits) -> str:
    most = f"{limits.max_queue_size} groups" + (f" or {limits.max_bytes} bytes" if limits.max_bytes else "")
    return f"Channel {snapshot.channel!r} was full ({most} a shard), and {snapshot.note or 'its group was the oldest'}."


def _reward_failed(snapshot: TrajectorySnapshot, limits: Limits) -> str:
    last = f" The last failure: {snapshot.note}" if snapshot.note else ""
    return f"It could not be scored in {limits.reward_attempts} attempts.{last}"


DROPPED: Mapping[str, Callable[[TrajectorySnapshot, Limits], str]] = {
    "aborted": lambda snapshot, limits: "Its producer aborted the rollout.",
    "empty": lambda snapshot, limits: "It was completed without a recorded call, or without a sound step and a reward.",
    "cleared": lambda snapshot, limits: f"Channel {snapshot.channel!r} was cleared.",
    "deadline": _deadline,
    "evicted": _evicted,
    "moved": lambda snapshot, limits: "It joined another group before its first call; the shard of that group has it.",
    "rejected": lambda snapshot, limits: f"It was rejected {snapshot.note}.",
    "reward_failed": _reward_failed,
    "rolled_back": lambda snapshot, limits: "A version of the policy said it, or part of it, that was rolled back.",
    "stale": lambda snapshot, limits: (
        f"It was dropped as stale: {snapshot.note}, max_staleness is {limits.max_staleness}."
    ),
}
"""A sentence for each cause."""
