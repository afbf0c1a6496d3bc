"""How old data is, counted from its oldest token at the moment it is shipped, and what is left of it."""

from collections.abc import Iterable

import numpy as np

from stepwell.pool.api.plan import Limits, OnStale
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.step import BoolArray


def oldest_version(steps: Iterable[StoredStep]) -> int | None:
    """The policy version of the oldest token; None if there is no step."""
    return min((step.oldest_version for step in steps), default=None)


def trained_mask(step: StoredStep, oldest_trained: int | None) -> BoolArray | None:
    """Which response tokens are trained if those of versions before `oldest_trained` are not; None means all."""
    if oldest_trained is None or step.oldest_version >= oldest_trained:
        return step.mask
    if not step.version_spans:
        return np.zeros(step.response_length, np.bool_)
    mask = np.ones(step.response_length, np.bool_) if step.mask is None else step.mask.copy()
    for span in step.version_spans:
        if span.version < oldest_trained:
            mask[span.start : span.end] = False
    return mask


def is_trained(step: StoredStep, oldest_trained: int | None) -> bool:
    """Is anything of the step left to train?"""
    mask = trained_mask(step, oldest_trained)
    return mask is None or bool(mask.any())


def is_stale(steps: Iterable[StoredStep], limits: Limits, policy_version: int) -> bool:
    """Would nothing of it be trained under the pool's rule for old data?"""
    if limits.max_staleness is None or limits.on_stale is OnStale.KEEP:
        return False
    held = list(steps)
    oldest = oldest_version(held)
    if oldest is None or policy_version - oldest <= limits.max_staleness:
        return False
    first = oldest_trained(limits, policy_version)
    return limits.on_stale is OnStale.DROP or not any(is_trained(step, first) for step in held)


def oldest_trained(limits: Limits, policy_version: int) -> int | None:
    """The version before which tokens are masked; None if none are."""
    if limits.max_staleness is None or limits.on_stale is not OnStale.MASK:
        return None
    return policy_version - limits.max_staleness
