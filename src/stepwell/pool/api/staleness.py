"""How old data may be when it is shipped, and what happens to older data.

- A distance counts how old a token is: DISTANCES has them, and `stale_by` of the limits names one.
- A consequence is what happens beyond `max_staleness`: CONSEQUENCES has them, and `on_stale` names one.

Another one is a class and a row. Leasing, shipping and the explanations follow the tables, and so does `--on-stale`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from stepwell.pool.api.plan import Limits
from stepwell.steps.step import BoolArray, VersionSpan


class AgedStep(Protocol):
    """What distances and consequences read of a step."""

    started_at: float
    """When its call began, by the clock of its gateway."""
    response_length: int
    mask: BoolArray | None
    version_spans: tuple[VersionSpan, ...]

    @property
    def oldest_version(self) -> int: ...


class Present(NamedTuple):
    """What distances are counted from."""

    policy_version: int
    """The version that counts for the channel."""
    now: float
    """The wall-clock time of the pool."""


class Distance:
    """How old tokens are. `max_staleness` is in its unit."""

    def of_tokens(self, step: AgedStep, version: int, present: Present) -> float:
        """The distance of the tokens of a step that this version of the policy sampled."""
        raise NotImplementedError

    def of_oldest(self, steps: Iterable[AgedStep], present: Present) -> float | None:
        """The largest distance of a token of these steps; None if there is no step."""
        told = ((step, version) for step in steps for version in versions_of(step))
        return max((self.of_tokens(step, version, present) for step, version in told), default=None)

    def words(self, distance: float) -> str:
        """For a person: what follows `the oldest token is`."""
        raise NotImplementedError

    def batches_ahead(self, max_staleness: int) -> int | None:
        """How many batches may be in progress so that none is too old when it is trained; None if that is not
        known."""
        return None


class VersionsBehind(Distance):
    """Versions of the policy from the one that sampled a token to the one that is trained now."""

    def of_tokens(self, step: AgedStep, version: int, present: Present) -> float:
        return versions_behind(version, present.policy_version)

    def of_oldest(self, steps: Iterable[AgedStep], present: Present) -> float | None:
        oldest = oldest_version(steps)
        return None if oldest is None else versions_behind(oldest, present.policy_version)

    def words(self, distance: float) -> str:
        return f"{distance:g} versions behind"

    def batches_ahead(self, max_staleness: int) -> int | None:
        return 1 + max_staleness


DISTANCES: Mapping[str, Callable[[], Distance]] = {"versions": VersionsBehind}
"""By the name that `stale_by` has."""


@dataclass(frozen=True, slots=True)
class Consequence:
    """What happens to old data. This one ships it as it is."""

    distance: Distance
    max_staleness: float
    """How far the tokens may be that are not old."""

    def is_stale(self, steps: Iterable[AgedStep], present: Present) -> bool:
        """Must these steps be dropped instead of shipped?"""
        return False

    def token_mask(self, step: AgedStep, present: Present) -> BoolArray | None:
        """Which response tokens of a shipped step are trained; None means all."""
        return step.mask

    def explain(self, distance: float) -> str:
        """What happens to held data whose oldest token is that far; empty if nothing."""
        return ""

    def is_old(self, steps: Iterable[AgedStep], present: Present) -> bool:
        """Is a token of these steps too far?"""
        found = self.distance.of_oldest(steps, present)
        return found is not None and found > self.max_staleness


class DropStale(Consequence):
    """Data with a token that is too old is dropped."""

    def is_stale(self, steps: Iterable[AgedStep], present: Present) -> bool:
        return self.is_old(steps, present)

    def explain(self, distance: float) -> str:
        return "it is dropped when its turn comes" if distance > self.max_staleness else ""


class MaskStale(Consequence):
    """Data is shipped, and its tokens that are too old are masked out of training. Without any other it is dropped."""

    def is_stale(self, steps: Iterable[AgedStep], present: Present) -> bool:
        found = list(steps)
        if not self.is_old(found, present):
            return False
        masks = (self.token_mask(step, present) for step in found)
        return not any(mask is None or mask.any() for mask in masks)

    def token_mask(self, step: AgedStep, present: Present) -> BoolArray | None:
        if not self.is_old((step,), present):
            return step.mask
        if not step.version_spans:
            return np.zeros(step.response_length, np.bool_)
        mask = np.ones(step.response_length, np.bool_) if step.mask is None else step.mask.copy()
        for span in step.version_spans:
            if self.distance.of_tokens(step, span.version, present) > self.max_staleness:
                mask[span.start : span.end] = False
        return mask

    def explain(self, distance: float) -> str:
        return "tokens that old are masked" if distance > self.max_staleness else ""


CONSEQUENCES: Mapping[str, Callable[[Distance, float], Consequence]] = {
    "drop": DropStale,
    "keep": Consequence,
    "mask": MaskStale,
}
"""By the name that `on_stale` has."""


def consequence_of(limits: Limits) -> Consequence:
    """What these limits do to old data. Without `max_staleness`, data of any age is shipped."""
    distance = DISTANCES[limits.stale_by]()
    if limits.max_staleness is None:
        return Consequence(distance, 0)
    return CONSEQUENCES[limits.on_stale](distance, limits.max_staleness)


def versions_behind(version: int, policy_version: int) -> int:
    """0 also for the tokens of a version on trial, which is newer than the pool's."""
    return max(0, policy_version - version)


def versions_of(step: AgedStep) -> set[int]:
    """The versions of the policy that sampled tokens of the step."""
    return {span.version for span in step.version_spans} or {step.oldest_version}


def oldest_version(steps: Iterable[AgedStep]) -> int | None:
    """The policy version of the oldest token; None if there is no step."""
    return min((step.oldest_version for step in steps), default=None)
