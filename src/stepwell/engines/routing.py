"""Which engine a call goes to.

The choice depends on names and counts alone. The engine that a trajectory sticks to is the same in every process;
engines may come and go between two choices.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Protocol, TypeVar

from stepwell.errors import BadRequest


class Routable(Protocol):
    """What a routing may know of an engine."""

    @property
    def address(self) -> str: ...
    @property
    def in_flight(self) -> int: ...


R = TypeVar("R", bound=Routable)


class Routing(Protocol):
    def choose(self, engines: Sequence[R], sticky: str) -> R:
        """One of `engines`, of which there is at least one, for a call of the trajectory named by `sticky`."""
        ...


class RoundRobin:
    """Each in its turn."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, engines: Sequence[R], sticky: str) -> R:
        self._turn = (self._turn + 1) % len(engines)
        return engines[self._turn]


class LeastBusy:
    """The one with the fewest calls in flight; among equals, each in its turn."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def choose(self, engines: Sequence[R], sticky: str) -> R:
        fewest = min(engine.in_flight for engine in engines)
        return self._turns.choose([engine for engine in engines if engine.in_flight == fewest], sticky)


class Sticky:
    """The same one for all calls of a trajectory, so that its prefix cache serves them.

    Rendezvous hashing: when an engine is lost, only its own trajectories move; when it returns, so do they.
    """

    def __init__(self) -> None:
        self._turns = RoundRobin()
        """For calls that belong to no trajectory."""

    def choose(self, engines: Sequence[R], sticky: str) -> R:
        if not sticky:
            return self._turns.choose(engines, sticky)
        return max(engines, key=lambda engine: blake2b(f"{sticky} {engine.address}".encode(), digest_size=8).digest())


ROUTINGS: Mapping[str, type[Routing]] = {"round_robin": RoundRobin, "least_busy": LeastBusy, "sticky": Sticky}


def routing_named(name: str) -> Routing:
    if name not in ROUTINGS:
        raise BadRequest(f"no routing is called {name!r}; there are: {', '.join(ROUTINGS)}")
    return ROUTINGS[name]()
