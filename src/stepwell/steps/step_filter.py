"""Which steps a consumer trains on. The others stand in its way neither as rows nor as carriers of a reward.

What always holds: a step that is left out is left out for one reason, and counted under its kind.
"""

from dataclasses import dataclass

from stepwell.errors import BadRequest
from stepwell.pool.state.stored_step import HeldStep
from stepwell.steps.soundness import fault_kind
from stepwell.steps.step import Exactness

TOO_INEXACT = "exactness"
"""The kind of those whose grade is too low."""


@dataclass(frozen=True, slots=True)
class Gate:
    min_exactness: Exactness
    """The lowest grade that passes."""
    untrainable: bool
    """Do steps that are marked untrainable pass too?"""

    def leaves_out(self, step: HeldStep) -> str | None:
        """The kind of reason for which a held step does not pass; None if it does."""
        if step.untrainable is not None and not self.untrainable:
            return fault_kind(step.untrainable)
        return None if step.exactness.at_least(self.min_exactness) else TOO_INEXACT

    def lets_through(self, step: HeldStep) -> bool:
        return step.is_held() and self.leaves_out(step) is None


def make_gate(min_exactness: str, untrainable: bool) -> Gate:
    """From the plain words of whoever calls."""
    try:
        return Gate(Exactness(min_exactness), untrainable)
    except ValueError as failure:
        raise BadRequest(str(failure)) from None
