"""What a reward function is, and how one function loads another by name."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from stepwell.pool.api.scoring import Score
from stepwell.rewards.sample import Sample
from stepwell.steps.step import JsonObject

Call: TypeAlias = Callable[[Sample], float | Score | Awaitable[float | Score]]


@dataclass(frozen=True, slots=True)
class RewardFunction:
    name: str
    """The source of the rewards that it returns."""
    call: Call
    is_async: bool


@runtime_checkable
class Loader(Protocol):
    def __call__(self, name: str, options: JsonObject | None = None) -> RewardFunction:
        """BadRequest if there is no such function."""
