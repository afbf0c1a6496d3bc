"""What happened to a channel in one interval of time, and how such moments come together: of several shards, or of
intervals that follow one another. Percentiles come together as the mean of theirs, weighted by how many rewards they
are of: near enough for a chart, and not exact."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stepwell.pool.api.watching import Window


class Moment(NamedTuple):
    """One value of each series in a Window."""

    steps: int = 0
    tokens: int = 0
    trained_steps: int = 0
    trained_tokens: int = 0
    rewards: int = 0
    reward_mean: float | None = None
    reward_low: float | None = None
    reward_high: float | None = None
    staleness: Mapping[int, int] = {}
    groups: int = 0
    ready_groups: int = 0
    oldest_age: float = 0.0
    dropped_tokens: Mapping[str, int] = {}


STILL = Moment()
"""Nothing is there and nothing happened."""


def one_after_another(moments: Sequence[Moment]) -> Moment:
    """What was held is what was held at the end."""
    last = moments[-1]
    return _sum(moments)._replace(groups=last.groups, ready_groups=last.ready_groups, oldest_age=last.oldest_age)


def side_by_side(moments: Sequence[Moment]) -> Moment:
    """Of several shards."""
    return _sum(moments) if len(moments) != 1 else moments[0]


def as_window(moments: Sequence[Moment]) -> Window:
    causes = sorted({cause for moment in moments for cause in moment.dropped_tokens})
    return Window(
        steps=[moment.steps for moment in moments],
        tokens=[moment.tokens for moment in moments],
        trained_steps=[moment.trained_steps for moment in moments],
        trained_tokens=[moment.trained_tokens for moment in moments],
        rewards=[moment.rewards for moment in moments],
        reward_mean=[moment.reward_mean for moment in moments],
        reward_low=[moment.reward_low for moment in moments],
        reward_high=[moment.reward_high for moment in moments],
        staleness=[moment.staleness for moment in moments],
        groups=[moment.groups for moment in moments],
        ready_groups=[moment.ready_groups for moment in moments],
        oldest_age=[moment.oldest_age for moment in moments],
        dropped_tokens={cause: [moment.dropped_tokens.get(cause, 0) for moment in moments] for cause in causes},
    )


def _sum(moments: Sequence[Moment]) -> Moment:
    staleness: Counter[int] = Counter()
    dropped: Counter[str] = Counter()
    for moment in moments:
        staleness.update(moment.staleness)
        dropped.update(moment.dropped_tokens)
    return Moment(
        steps=sum(moment.steps for moment in moments),
        tokens=sum(moment.tokens for moment in moments),
        trained_steps=sum(moment.trained_steps for moment in moments),
        trained_tokens=sum(moment.trained_tokens for moment in moments),
        rewards=sum(moment.rewards for moment in moments),
        reward_mean=_mean([(moment.reward_mean, moment.rewards) for moment in moments]),
        reward_low=_mean([(moment.reward_low, moment.rewards) for moment in moments]),
        reward_high=_mean([(moment.reward_high, moment.rewards) for moment in moments]),
        staleness=dict(staleness),
        groups=sum(moment.groups for moment in moments),
        ready_groups=sum(moment.ready_groups for moment in moments),
        oldest_age=max((moment.oldest_age for moment in moments), default=0.0),
        dropped_tokens=dict(dropped),
    )


def _mean(weighted: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in weighted if value is not None]
    many = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / many if many else None
