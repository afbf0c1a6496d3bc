"""What a shard answers to those who ask what it has, before they ask for any of it."""

from collections.abc import Sequence
from typing import NamedTuple

from stepwell.pool.api.watching import Cursor


class Peek(NamedTuple):
    """What a shard could give now."""

    state: int
    """The state this is true of, to be given to `wait_change`."""
    ages: list[float]
    """When what is ready was opened, oldest first."""
    nothing_after: float
    """In strict order, what was opened later must wait."""


class Glimpse(NamedTuple):
    """What a shard tells a watcher."""

    sketches: Sequence[tuple[object, ...]]
    """Plain tuples, for they travel at a fraction of a Summary's cost."""
    cursor: Cursor
    anew: bool
    more: bool
