"""Why a trajectory is not trained, or not yet: one or two sentences for a person."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stepwell.pool.api.plan import Limits, OnIncomplete
from stepwell.pool.api.staleness import Present, consequence_of
from stepwell.pool.api.watching import REWARD, TrajectorySnapshot, TrajectoryState
from stepwell.steps.step import BoolArray, VersionSpan
from stepwell.steps.trainable import (
    INCOMPLETE,
    NO_CONSENT,
    NO_SOUND_STEP,
    NOT_CONTINUED,
    OTHER_MODEL,
    TOO_INEXACT,
    UNSEEN,
)


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
    if not snapshot.cause:
        return ""
    if snapshot.cause == TOO_INEXACT:
        return f"The trainer left all of it out: its exactness, {snapshot.exactness}, is lower than requested."
    if snapshot.cause == OTHER_MODEL:
        return "The trainer left all of it out: another model or adapter wrote it than the one that is trained."
    if snapshot.cause == NO_CONSENT:
        return "No trainer gets it: whose data it is did not agree to training."
    if snapshot.cause == UNSEEN:
        return "No trainer gets it: nobody read its answers to their end. Its reward counted in its group."
    if snapshot.cause == INCOMPLETE:
        return "No trainer gets it: a call of it is missing, because its gateway died or gave the call's step up."
    if snapshot.cause == NOT_CONTINUED:
        return "No trainer gets it: other choices of its answers were continued. Its reward counted in its group."
    if snapshot.cause == NO_SOUND_STEP:
        return "No sound step of it was recorded. Its reward counted in its group."
    return f"The trainer left all of it out: its steps are marked untrainable, as {snapshot.cause}."


def _stale(snapshot: TrajectorySnapshot, limits: Limits) -> str:
    return f"It was dropped as stale: {snapshot.note}, max_staleness is {limits.max_staleness}."


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
    "stale": _stale,
}
"""A sentence for each cause."""
