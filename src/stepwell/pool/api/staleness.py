"""How old data may be when it is shipped, counted from its oldest token, and what happens to older data.

Another rule is one class and one row of STALENESS_RULES; `--on-stale` and the explanations follow the table.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stepwell.steps.step import BoolArray, VersionSpan


class AgedStep(Protocol):
    """What a rule reads of a step."""

    response_length: int
    mask: BoolArray | None
    version_spans: tuple[VersionSpan, ...]

    @property
    def oldest_version(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StalenessRule:
    """What happens to old data. This rule ships it as it is."""

    max_staleness: int
    """How many policy versions a token may be behind."""

    def is_stale(self, steps: Iterable[AgedStep], policy_version: int) -> bool:
        """Must these steps be dropped instead of shipped?"""
        return False

    def token_mask(self, step: AgedStep, policy_version: int) -> BoolArray | None:
        """Which response tokens of a shipped step are trained; None means all."""
        return step.mask

    def explain(self, behind: int) -> str:
        """What happens to held data whose oldest token is that many versions behind; empty if nothing."""
        return ""


class DropStale(StalenessRule):
    """Data with a token that is too old is dropped."""

    def is_stale(self, steps: Iterable[AgedStep], policy_version: int) -> bool:
        oldest = oldest_version(steps)
        return oldest is not None and policy_version - oldest > self.max_staleness

    def explain(self, behind: int) -> str:
        return "it is dropped when its turn comes" if behind > self.max_staleness else ""


class MaskStale(StalenessRule):
    """Data is shipped, and its tokens that are too old are masked out of training. Without any other it is dropped."""

    def is_stale(self, steps: Iterable[AgedStep], policy_version: int) -> bool:
        found = list(steps)
        oldest = oldest_version(found)
        if oldest is None or policy_version - oldest <= self.max_staleness:
            return False
        masks = (self.token_mask(step, policy_version) for step in found)
        return not any(mask is None or mask.any() for mask in masks)

    def token_mask(self, step: AgedStep, policy_version: int) -> BoolArray | None:
        oldest_trained = policy_version - self.max_staleness
        if step.oldest_version >= oldest_trained:
            return step.mask
        if not step.version_spans:
            return np.zeros(step.response_length, np.bool_)
        mask = np.ones(step.response_length, np.bool_) if step.mask is None else step.mask.copy()
        for span in step.version_spans:
            if span.version < oldest_trained:
                mask[span.start : span.end] = False
        return mask

    def explain(self, behind: int) -> str:
        return "tokens that old are masked" if behind > self.max_staleness else ""


STALENESS_RULES: Mapping[str, Callable[[int], StalenessRule]] = {
    "drop": DropStale,
    "keep": StalenessRule,
    "mask": MaskStale,
}
"""By the name that `on_stale` has."""


def staleness_rule(max_staleness: int | None, on_stale: str) -> StalenessRule:
    """The rule of that name. Without a limit, data of any age is shipped."""
    return StalenessRule(0) if max_staleness is None else STALENESS_RULES[on_stale](max_staleness)


def versions_behind(version: int, policy_version: int) -> int:
    """0 also for what a canary said, whose version is newer than the pool's."""
    return max(0, policy_version - version)


def oldest_version(steps: Iterable[AgedStep]) -> int | None:
    """The policy version of the oldest token; None if there is no step."""
    return min((step.oldest_version for step in steps), default=None)
