"""The two tests of a version of the policy against the stable one: by the rewards of its canary, and by its validation.

The canary's rewards are compared with the stable version's as they come. Each comparison is the difference d between
the mean of some rewards of the canary and the mean of some rewards of the stable version that came at the same time.
Two bets are made on each difference before it is known, and the capital of a bet is multiplied by its result:

- `worse`: 1 − λ d. While the canary is not worse (mean of d ≥ 0), its expected capital does not grow. So the
  probability that it ever reaches 1 / alpha is at most alpha (Ville's inequality). If it does, the canary is rolled
  back.
- `not_worse`: 1 + λ (d + margin). While the canary is worse by the margin or more, the probability that it ever
  reaches 1 / beta is at most beta. If it does, the canary is promoted.

Invariants of this sequential test:
- The probabilities hold whatever the distribution of the rewards is, however often one looks, and if the mean reward of
  all versions moves with time. They need comparisons that do not depend on each other.
- The capital of a bet is the mean over several λ, so no λ has to be chosen. The smallest one is so small that one of
  the bets gains whatever the difference is: a test ends as long as rewards come.
- Nothing else decides, and no time is too long: without evidence the canary goes on.
- There is no clock, and the whole state is numbers that JSON can hold.

Validation asks whether a version is worse on the same tasks, by more than chance explains:
- Each task is compared with itself, so that it does not matter how hard it is. A task that only one has is left out.
- Only scores of the stable version that were made for this comparison refuse a version. Kept ones let it pass: if they
  were lucky, they would refuse every equal version from then on.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist
from typing import Literal, NamedTuple, TypeAlias

from stepwell.errors import BadRequest
from stepwell.pool.api.policy import VersionReward
from stepwell.trainers.guard.guard_settings import ComparisonSettings, GuardSettings

STAKES = (0.3, 0.6, 0.95)
"""λ, as shares of the largest one that cannot lose everything."""
SMALLEST_STAKE = 1.5
"""The smallest λ is at most this share of the margin. With a larger one both bets lose by the rewards' variance if the
canary is worse by half the margin."""
BLOCK = 4
"""Rewards of one version in one comparison, at most. More would make its mean hardly more exact."""
WAITING = 100
"""Rewards of one version that wait for one of the other; older ones are not compared."""
REMEMBERED_SESSIONS = 3000
LEAST_EVIDENCE = 0.05
"""The least evidence from which one can tell how long a test will take."""
Scores: TypeAlias = Mapping[str, float]
"""The mean reward of each task, by its name."""


class Verdict(NamedTuple):
    action: Literal["promote", "rollback"]
    reason: str


class DecisionEvidence(NamedTuple):
    """The share that there is of what a decision needs, from 0 to 1. On average it grows evenly."""

    promote: float
    rollback: float


@dataclass(slots=True)
class ComparisonState:
    """All that a test knows; rewards are scaled to the range from 0 to 1."""

    worse: list[float] = field(default_factory=lambda: [0.0] * len(STAKES))
    not_worse: list[float] = field(default_factory=lambda: [0.0] * len(STAKES))
    """The logarithm of the capital, for each λ."""
    comparisons: int = 0
    difference: float = 0.0
    """The sum over all comparisons."""
    canary_waiting: list[float] = field(default_factory=list)
    stable_waiting: list[float] = field(default_factory=list)
    canary_rewards: int = 0
    canary_sum: float = 0.0
    stable_rewards: int = 0
    stable_sum: float = 0.0
    sessions: dict[str, int] = field(default_factory=dict)
    """How many rewards of each trajectory were counted."""


class SequentialTest:
    def __init__(self, settings: ComparisonSettings, state: ComparisonState | None = None) -> None:
        self.state = state or ComparisonState()
        self._settings = settings
        self._low, high = settings.reward_range
        self._width = high - self._low
        self._margin = settings.margin / self._width
        self._stakes = (min(STAKES[0], SMALLEST_STAKE * self._margin), *STAKES[1:])

    def add(self, rewards: Sequence[VersionReward], *, canary: int, stable: int) -> None:
        """Rewards in the order in which they came; those of other versions do not count."""
        state = self.state
        for reward in rewards:
            if reward.version not in (canary, stable) or not math.isfinite(reward.reward) or not self._counts(reward):
                continue
            scaled = min(max((reward.reward - self._low) / self._width, 0.0), 1.0)
            if reward.version == canary:
                state.canary_waiting.append(scaled)
                state.canary_rewards += 1
                state.canary_sum += scaled
            else:
                state.stable_waiting.append(scaled)
                state.stable_rewards += 1
                state.stable_sum += scaled
        self._compare()

    def verdict(self) -> Verdict | None:
        """The decision about the canary; None: go on."""
        settings = self._settings
        if self.capital_worse >= 1 / settings.alpha:
            return Verdict("rollback", f"worse than the stable version (alpha {settings.alpha:g}): {self.figures()}")
        if self.capital_not_worse >= 1 / settings.beta:
            text = f"not worse by {settings.margin:g} (beta {settings.beta:g})"
            return Verdict("promote", f"{text}: {self.figures()}")
        return None

    def outlook(self, seconds: float) -> str:
        """How much evidence there is after that time, and how long it will still take."""
        evidence, remaining = self.evidence, self.remaining(seconds)
        rate = f"at this rate ({60 * self.state.comparisons / seconds:.2g} comparisons a minute)"
        if not self.state.comparisons:
            ending = "without comparisons it has no end: rewards of the canary or of the stable version do not come"
        elif remaining is None:
            ending = f"{rate} how long it will take cannot be said yet"
        else:
            ending = f"{rate} about {_minutes(remaining)} more"
        return (
            f"no decision after {_minutes(seconds)}: evidence {evidence.promote:.0%} of what a promotion needs and "
            f"{evidence.rollback:.0%} of what a rollback needs; {self.figures()}; {ending}"
        )

    @property
    def evidence(self) -> DecisionEvidence:
        return DecisionEvidence(
            _share(self.state.not_worse, self._settings.beta), _share(self.state.worse, self._settings.alpha)
        )

    def remaining(self, seconds: float) -> float | None:
        """Seconds until the decision that has more evidence, if it goes on as in the first `seconds`. None with hardly
        any evidence."""
        share = max(self.evidence)
        return seconds * (1.0 - share) / share if share >= LEAST_EVIDENCE else None

    @property
    def capital_worse(self) -> float:
        return _mean_capital(self.state.worse)

    @property
    def capital_not_worse(self) -> float:
        return _mean_capital(self.state.not_worse)

    @property
    def mean_difference(self) -> float:
        """How far the canary's reward is from the stable version's, in units of the reward; 0 before the first
        comparison."""
        return self._width * self.state.difference / max(1, self.state.comparisons)

    @property
    def canary_mean(self) -> float | None:
        return self._mean(self.state.canary_sum, self.state.canary_rewards)

    @property
    def stable_mean(self) -> float | None:
        return self._mean(self.state.stable_sum, self.state.stable_rewards)

    def figures(self) -> str:
        state = self.state
        return (
            f"mean reward {_shown(self.canary_mean)} of {state.canary_rewards} against {_shown(self.stable_mean)} of "
            f"{state.stable_rewards}, difference {self.mean_difference:+.2f} in {state.comparisons} comparisons"
        )

    def _counts(self, reward: VersionReward) -> bool:
        limit, sessions = self._settings.rewards_per_session, self.state.sessions
        if limit is None:
            return True
        counted = sessions.pop(reward.trajectory_uid, 0)
        sessions[reward.trajectory_uid] = min(counted + 1, limit)
        if len(sessions) > REMEMBERED_SESSIONS:
            del sessions[next(iter(sessions))]
        return counted < limit

    def _compare(self) -> None:
        """Makes as many comparisons as the version with fewer rewards allows. What is left of the other waits."""
        state = self.state
        count = min(len(state.canary_waiting), len(state.stable_waiting))
        largest = BLOCK * count
        of_canary = _means(state.canary_waiting[:largest], count)
        of_stable = _means(state.stable_waiting[:largest], count)
        for canary, stable in zip(of_canary, of_stable, strict=True):
            self._bet(canary - stable)
        state.canary_waiting = state.canary_waiting[largest:][-WAITING:]
        state.stable_waiting = state.stable_waiting[largest:][-WAITING:]

    def _bet(self, difference: float) -> None:
        state, largest = self.state, 1 / (1 - self._margin)
        state.comparisons += 1
        state.difference += difference
        state.worse = self._after(state.worse, -difference)
        state.not_worse = self._after(state.not_worse, largest * (difference + self._margin))

    def _after(self, capital: Sequence[float], result: float) -> list[float]:
        """The logarithms of the capital after a bet; `result` is at least -1."""
        return [logarithm + math.log1p(stake * result) for logarithm, stake in zip(capital, self._stakes, strict=True)]

    def _mean(self, total: float, count: int) -> float | None:
        return self._low + self._width * total / count if count else None


def _means(rewards: Sequence[float], count: int) -> Iterator[float]:
    """The means of `count` parts of about the same size, in order."""
    ends = [len(rewards) * number // max(1, count) for number in range(count + 1)]
    for start, end in pairwise(ends):
        yield math.fsum(rewards[start:end]) / (end - start)


def _mean_capital(logarithms: Sequence[float]) -> float:
    return math.fsum(math.exp(min(logarithm, 700.0)) for logarithm in logarithms) / len(logarithms)


def _share(logarithms: Sequence[float], error_rate: float) -> float:
    """The share of the capital at which the best stake decides alone: its logarithm grows evenly, unlike that of the
    mean."""
    return min(max(max(logarithms) / math.log(len(logarithms) / error_rate), 0.0), 1.0)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _shown(mean: float | None) -> str:
    return "unknown" if mean is None else f"{mean:.2f}"


class PairedDifference(NamedTuple):
    """How much higher the scores of one version are than those of the other, on the tasks that both have."""

    mean: float
    error: float
    """The standard error of the mean."""
    tasks: int

    def is_worse(self, settings: GuardSettings) -> bool:
        """Whether the scores are worse by more than the margin, and by more than an equal version is with a probability
        of `alpha` (a paired t-test)."""
        return self.mean < -max(settings.validation_margin, _quantile(settings.alpha, self.tasks) * self.error)


def compare(scores: Scores, stable: Scores, version: int) -> PairedDifference:
    """BadRequest if the version and the stable one, whose number is given, have fewer than two tasks in common."""
    found = [scores[task] - stable[task] for task in scores.keys() & stable.keys()]
    differences = [difference for difference in found if math.isfinite(difference)]
    count = len(differences)
    if count < 2:
        raise BadRequest(
            f"validation has {count} tasks with those of version {version} in common: validate each version on the "
            "same tasks, or return None"
        )
    mean = math.fsum(differences) / count
    variance = math.fsum((difference - mean) ** 2 for difference in differences) / (count - 1)
    return PairedDifference(mean, math.sqrt(variance / count), count)


def refusal(
    scores: Scores,
    stable: int,
    kept: Scores | None,
    validate_stable: Callable[[], Scores | None],
    settings: GuardSettings,
) -> PairedDifference | None:
    """Why the version is refused; None if it passes. `kept` are earlier scores of the stable version."""
    if kept is not None and not compare(scores, kept, stable).is_worse(settings):
        return None
    fresh = validate_stable()
    found = None if fresh is None else compare(scores, fresh, stable)
    return found if found is not None and found.is_worse(settings) else None


def mean_of(scores: Scores) -> float:
    return math.fsum(scores.values()) / len(scores)


def checked(scores: object) -> Scores | None:
    """The scores that a user's function has returned; without scores it has not validated."""
    if scores is not None and not isinstance(scores, Mapping):
        raise BadRequest(f"validate returns a score by task, {{name: score}}, or None, and not {scores!r:.50}")
    return scores or None


def _quantile(alpha: float, tasks: int) -> float:
    """A quantile of Student's t distribution, by the first terms of its expansion in the degrees of freedom."""
    normal = NormalDist().inv_cdf(1.0 - alpha)
    return normal + (normal**3 + normal) / (4 * (tasks - 1))
