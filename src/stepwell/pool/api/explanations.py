"""Why a trajectory was not trained, or not yet, in a sentence or two for a person."""

from collections.abc import Callable, Mapping

from stepwell.pool.api.plan import Limits, OnStale
from stepwell.pool.api.watching import REWARD, TrajectorySnapshot, TrajectoryState
from stepwell.steps.step_filter import TOO_INEXACT


def why_not_trained(snapshot: TrajectorySnapshot, limits: Limits, policy_version: int) -> str:
    """Empty for one that was trained."""
    if snapshot.state is TrajectoryState.TRAINED:
        return _left_out(snapshot)
    if snapshot.state is TrajectoryState.DROPPED:
        said = DROPPED.get(snapshot.cause)
        return said(snapshot, limits) if said else f"It was dropped: {snapshot.cause or 'no cause is known'}."
    return " ".join(part for part in (_waits(snapshot, limits), _grows_stale(snapshot, limits, policy_version)) if part)


def _waits(snapshot: TrajectorySnapshot, limits: Limits) -> str:
    if snapshot.state is TrajectoryState.OPEN:
        started = "" if snapshot.steps else " and has no step yet"
        return f"Its rollout still goes on{started}: it waits to be completed."
    if snapshot.state is TrajectoryState.LEASED:
        if snapshot.note:
            return f"A trainer has it. It was rejected {snapshot.note}; so if it comes back, it is dropped."
        return "A trainer has it and has not acknowledged it yet; if it does not, it comes back."
    if snapshot.state is TrajectoryState.READY:
        return "It is ready, and waits for a trainer to take it."
    if snapshot.cause == REWARD:
        own = "It waits for a reward" if snapshot.reward is None else "Its group waits for rewards"
        return f"{own}: with require_reward nothing is handed out unscored."
    within = "" if limits.group_deadline is None else f", {limits.group_deadline:g} s after the first at most"
    return f"It is complete; its group of {snapshot.group_size} still waits for other rollouts{within}."


def _grows_stale(snapshot: TrajectorySnapshot, limits: Limits, policy_version: int) -> str:
    """Of one that is held."""
    if snapshot.oldest_version is None or limits.max_staleness is None or limits.on_stale is OnStale.KEEP:
        return ""
    behind = policy_version - snapshot.oldest_version
    if behind <= limits.max_staleness or snapshot.state is TrajectoryState.LEASED:
        return ""
    fate = "it is dropped when its turn comes" if limits.on_stale is OnStale.DROP else "tokens that old are masked"
    return f"Its oldest token is {behind} versions behind by now, and max_staleness is {limits.max_staleness}: {fate}."


def _left_out(snapshot: TrajectorySnapshot) -> str:
    if not snapshot.cause:
        return ""
    if snapshot.cause == TOO_INEXACT:
        return f"The trainer left all of it out: its exactness, {snapshot.exactness}, is lower than what was asked for."
    return f"The trainer left all of it out: its steps are marked untrainable, as {snapshot.cause}."


def _stale(snapshot: TrajectorySnapshot, limits: Limits) -> str:
    return f"It was dropped as stale: {snapshot.note}, max_staleness is {limits.max_staleness}."


def _deadline(snapshot: TrajectorySnapshot, limits: Limits) -> str:
    within = "" if limits.group_deadline is None else f" of {limits.group_deadline:g} s"
    return f"Its group was not complete within its deadline{within}, and it went with what was missing."


def _evicted(snapshot: TrajectorySnapshot, limits: Limits) -> str:
    most = f"{limits.max_queue_size} groups" + (f" or {limits.max_bytes} bytes" if limits.max_bytes else "")
    return f"Channel {snapshot.channel!r} was full ({most} a shard), and its group was the oldest."


def _reward_failed(snapshot: TrajectorySnapshot, limits: Limits) -> str:
    last = f" The last failure: {snapshot.note}" if snapshot.note else ""
    return f"It could not be scored in {limits.reward_attempts} attempts.{last}"


DROPPED: Mapping[str, Callable[[TrajectorySnapshot, Limits], str]] = {
    "aborted": lambda snapshot, limits: "Its rollout was aborted by whoever ran it.",
    "empty": lambda snapshot, limits: "It was completed without a single sound step.",
    "cleared": lambda snapshot, limits: f"Channel {snapshot.channel!r} was cleared.",
    "deadline": _deadline,
    "evicted": _evicted,
    "rejected": lambda snapshot, limits: f"It was rejected {snapshot.note}.",
    "reward_failed": _reward_failed,
    "stale": _stale,
}
"""What is said of each cause."""
