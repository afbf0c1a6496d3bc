"""How old data is, counted from its oldest token at the moment it is shipped, and what is left of it."""

from collections.abc import Iterable

import numpy as np

from stepwell.core.held import HeldStep
from stepwell.core.step import BoolArray


def oldest_version(steps: Iterable[HeldStep]) -> int | None:
    """The policy version of the oldest token; None if there is no step."""
    return min((step.oldest_version for step in steps), default=None)


def trained_mask(step: HeldStep, oldest_trained: int | None) -> BoolArray | None:
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


def is_trained(step: HeldStep, oldest_trained: int | None) -> bool:
    """Is anything of the step left to train?"""
    mask = trained_mask(step, oldest_trained)
    return mask is None or bool(mask.any())
