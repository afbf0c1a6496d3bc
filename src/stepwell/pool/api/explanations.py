"""Why a trajectory was not trained, or not yet, in a sentence or two for a person."""

from collections.abc import Callable, Mapping

from stepwell.pool.api.plan import Limits, OnStale
from stepwell.pool.api.watching import State, Summary
from stepwell.pool.state.view import REWARD
from stepwell.steps.step_filter import TOO_INEXACT


def why_not_trained(summary: Summary, limits: Limits, policy_version: int) -> str:
    """Empty for one that was trained."""
    if summary.state is State.TRAINED:
        return _left_out(summary)
    if summary.state is State.DROPPED:
        said = DROPPED.get(summary.cause)
        return said(summary, limits) if said else f"It was dropped: {summary.cause or 'no cause is known'}."
    return " ".join(part for part in (_waits(summary, limits), _grows_stale(summary, limits, policy_version)) if part)


def _waits(summary: Summary, limits: Limits) -> str:
    if summary.state is State.OPEN:
        started = "" if summary.steps else " and has no step yet"
        return f"Its rollout still goes on{started}: it waits to be completed."
    if summary.state is State.LEASED:
        if summary.note:
            return f"A trainer has it. It was rejected {summary.note}; so if it comes back, it is dropped."
        return "A trainer has it and has not acknowledged it yet; if it does not, it comes back."
    if summary.state is State.READY:
        return "It is ready, and waits for a trainer to take it."
    if summary.cause == REWARD:
        own = "It waits for a reward" if summary.reward is None else "Its group waits for rewards"
        return f"{own}: with require_reward nothing is handed out unscored."
    within = "" if limits.group_deadline is None else f", {limits.group_deadline:g} s after the first at most"
    return f"It is complete; its group of {summary.group_size} still waits for other rollouts{within}."


def _grows_stale(summary: Summary, limits: Limits, policy_version: int) -> str:
    """Of one that is held."""
    if summary.oldest_version is None or limits.max_staleness is None or limits.on_stale is OnStale.KEEP:
        return ""
    behind = policy_version - summary.oldest_version
    if behind <= limits.max_staleness or summary.state is State.LEASED:
        return ""
    fate = "it is dropped when its turn comes" if limits.on_stale is OnStale.DROP else "tokens that old are masked"
    return f"Its oldest token is {behind} versions behind by now, and max_staleness is {limits.max_staleness}: {fate}."


def _left_out(summary: Summary) -> str:
    if not summary.cause:
        return ""
    if summary.cause == TOO_INEXACT:
        return f"The trainer left all of it out: its exactness, {summary.exactness}, is lower than what was asked for."
    return f"The trainer left all of it out: its steps are marked untrainable, as {summary.cause}."


def _stale(summary: Summary, limits: Limits) -> str:
    return f"It was dropped as stale: {summary.note}, max_staleness is {limits.max_staleness}."


def _deadline(summary: Summary, limits: Limits) -> str:
    within = "" if limits.group_deadline is None else f" of {limits.group_deadline:g} s"
    return f"Its group was not complete within its deadline{within}, and it went with what was missing."


def _evicted(summary: Summary, limits: Limits) -> str:
    most = f"{limits.max_queue_size} groups" + (f" or {limits.max_bytes} bytes" if limits.max_bytes else "")
    return f"Channel {summary.channel!r} was full ({most} a shard), and its group was the oldest."


def _reward_failed(summary: Summary, limits: Limits) -> str:
    last = f" The last failure: {summary.note}" if summary.note else ""
    return f"It could not be scored in {limits.reward_attempts} attempts.{last}"


DROPPED: Mapping[str, Callable[[Summary, Limits], str]] = {
    "aborted": lambda summary, limits: "Its rollout was aborted by whoever ran it.",
    "empty": lambda summary, limits: "It was completed without a single sound step.",
    "cleared": lambda summary, limits: f"Channel {summary.channel!r} was cleared.",
    "deadline": _deadline,
    "evicted": _evicted,
    "rejected": lambda summary, limits: f"It was rejected {summary.note}.",
    "reward_failed": _reward_failed,
    "stale": _stale,
}
"""What is said of each cause."""
