"""Validation of a version: is it worse than the stable version on the same tasks, by more than chance explains?

- Each task is compared with itself, so that it does not matter how hard it is. A task that only one has is left out.
- Only scores of the stable version that were made for this comparison refuse a version. Kept ones let it pass: if they
  were lucky, they would refuse every equal version from then on.
"""

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from stepwell.errors import BadRequest
from stepwell.trainers.guard.guard_settings import GuardSettings

if TYPE_CHECKING:
    import torch

Scores: TypeAlias = Mapping[str, float]
"""The mean reward of each task, by its name."""

Validate: TypeAlias = Callable[["torch.nn.Module", int], Scores | None]
"""The scores of a model and version in validation; None if there are none, and the version passes."""


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
