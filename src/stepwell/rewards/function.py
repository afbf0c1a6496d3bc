"""What a reward function is, and how one function loads another by name."""

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


Loader: TypeAlias = Callable[..., RewardFunction]
"""Takes a name and options; BadRequest if there is no such function."""
