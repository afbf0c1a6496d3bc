"""The contract of a reward function, and how one function loads another by name."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from stepwell.pool.api.scoring import Score
from stepwell.rewards.sample import Sample

Call: TypeAlias = Callable[[Sample], float | Score | Awaitable[float | Score]]


@dataclass(frozen=True, slots=True)
class RewardFunction:
    name: str
    """The source of the rewards that it returns."""
    call: Call
    is_async: bool
    by_step: bool = False
    """Whether the function rewards single steps, of open trajectories too, as soon as a later step shows what came
    next. A function says so by an attribute `by_step = True`."""


Loader: TypeAlias = Callable[..., RewardFunction]
"""Takes a name and options; BadRequest if there is no such function."""
