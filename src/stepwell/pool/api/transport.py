"""How a call gets to an actor: a shard of the pool, or a reward worker."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stepwell.common.message_format import sent


@sent
class ActorAway(Exception):
    """The actor does not run now, or cannot be reached. It may come back."""


@sent
class ActorMissing(Exception):
    """There is no actor of that name."""


@sent
class ActorFailed(Exception):
    """The actor's own code raised an exception that is none of Stepwell's errors."""

    def __init__(self, reason: str, traceback: str = "") -> None:
        super().__init__(reason, traceback)
        self.reason = reason
        """The exception, in one line."""
        self.traceback = traceback
        """Where it was raised, in the actor."""

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.reason, self.traceback)))


class ActorTransport(Protocol):
    @property
    def connections(self) -> int:
        """How often it was connected. After a new one, an actor may be another one of the same name."""

    async def call(self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], /) -> Any:
        """ActorAway if the actor cannot be reached now; ActorMissing if there is none of that name."""
