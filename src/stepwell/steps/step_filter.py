"""Which steps a consumer trains on. A step that is left out is not shipped; its reward still counts in the return.

A step is left out for one reason and counted under the kind of that reason.
"""

from dataclasses import dataclass
from typing import Protocol

from stepwell.common.message_format import message
from stepwell.errors import BadRequest
from stepwell.steps.step import Exactness
from stepwell.steps.trainable import SIDE_CALL, fault_kind

TOO_INEXACT = "exactness"
"""The kind of reason for steps whose grade is too low."""
OTHER_MODEL = "model"
"""The kind of reason for steps that another model or adapter wrote than the one that is trained."""

NO_CONSENT = "no_consent"
"""The kind of reason for steps of people who did not agree to training."""
UNSEEN = "unseen"
"""The kind of reason for answers that nobody read to their end: the client had gone, or got an error instead."""
NOT_CONTINUED = "not_continued"
"""The kind of reason for choices of an answer of which another one was continued."""
INCOMPLETE = "incomplete"
"""The kind of reason for rollouts that lack a call, because the gateway that answered it died."""
NEVER_TRAINED = (NO_CONSENT, UNSEEN, NOT_CONTINUED, INCOMPLETE)
"""No filter accepts steps that are left out for these reasons."""
ASIDE = (SIDE_CALL, UNSEEN, NOT_CONTINUED)
"""Kinds of steps that are no part of the conversation that led to the reward."""
NO_SOUND_STEP = "no_sound_step"
"""The kind of reason for rollouts that count in their group and have no sound step."""


class FilteredStep(Protocol):
    """The fields of a step that the filter reads."""

    exactness: Exactness
    untrainable: str | None
    model: str

    def is_held(self) -> bool: ...


@message
@dataclass(frozen=True, slots=True)
class StepFilter:
    min_exactness: Exactness
    """The lowest grade that is accepted."""
    untrainable: bool
    """Are steps that are marked untrainable accepted too, if the reason is not in NEVER_TRAINED?"""
    models: tuple[str, ...] = ()
    """The models that are trained; empty means any. A step whose model is not known is accepted."""

    def rejection_kind(self, step: FilteredStep) -> str | None:
        """The kind of reason for which a held step is left out; None if it is accepted."""
        if step.untrainable is not None and (not self.untrainable or fault_kind(step.untrainable) in NEVER_TRAINED):
            return fault_kind(step.untrainable)
        if self.models and step.model and step.model not in self.models:
            return OTHER_MODEL
        return None if step.exactness.at_least(self.min_exactness) else TOO_INEXACT

    def accepts(self, step: FilteredStep) -> bool:
        if step.untrainable is None and step.exactness is self.min_exactness and not self.models:  # most steps
            return step.is_held()
        return step.is_held() and self.rejection_kind(step) is None


def make_step_filter(min_exactness: str, untrainable: bool) -> StepFilter:
    """BadRequest if there is no such grade."""
    try:
        return StepFilter(Exactness(min_exactness), untrainable)
    except ValueError as failure:
        raise BadRequest(str(failure)) from None
