"""One call and what came of it: what the agent was told, and what the gateway recorded."""

from dataclasses import dataclass

from stepwell.doctor.detokenizer import Spelled
from stepwell.doctor.replies import Heard
from stepwell.steps.step import Step


@dataclass(frozen=True, slots=True)
class Answer:
    heard: tuple[Heard, ...] = ()
    steps: tuple[Step, ...] = ()
    spelled: tuple[Spelled | None, ...] = ()
    """What each step's response spells."""
    failure: str = ""
    """Why there is no answer, or no end of one."""

    @property
    def is_sound(self) -> bool:
        """It came, and nothing recorded of it was quarantined."""
        return not self.failure and bool(self.steps) and all(step.quarantine is None for step in self.steps)
