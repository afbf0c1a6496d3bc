"""How far an environment is, and those who are told: whoever shows it, and whoever keeps its groups."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from stepwell.envs.scored_data import ScoredDataGroup


@dataclass(frozen=True, slots=True)
class Progress:
    name: str
    done: int
    """Training steps; in `process`, groups written."""
    total: int
    """How many of them there are to be."""
    delivered: int
    """Groups sent, or written."""
    running: int
    """Groups under way."""
    queue: int | None = None
    """Groups that wait for the trainer, as the rollout server last said."""
    idle: str = ""
    """Why no groups are started now; empty while they are."""
    is_evaluating: bool = False
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Groups that came to nothing, by cause."""


class Show(Protocol):
    def update(self, progress: Progress) -> None:
        """Called often; must not take long."""


class Sink(Protocol):
    def write(self, group: ScoredDataGroup) -> None: ...


class Silence:
    """Shows nothing."""

    def update(self, progress: Progress) -> None:
        pass
