"""How calls get to an actor, a shard of the pool or a reward worker, and how news of a shard gets to those who wait.

- News come under topics. A topic has a revision, which changes whenever there is something new. A process asks for
  topics, each with the revision that it has seen, and is answered as soon as one of them has another revision.
- What is small comes with the answer. Of the rest the answer only says that there may be something, and the process
  asks for it as usual.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from stepwell.common.message_format import message, sent


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


SERVING = "serving"
"""What serves the policy: a Serving."""
PLAN = "plan"
"""The shards of the pool: a PoolPlan."""
SYNC = "sync"
"""True if a trainer lives that syncs weights. Only the first shard knows."""
UNSCORED = "unscored"
"""There may be a trajectory for a reward worker."""
CHANGES = "changes"
"""There may be something for a watcher."""


def ready_topic(channel: str) -> str:
    """What consumers of a channel may get has changed: ReadyCounts."""
    return f"ready.{channel}"


def flush_topic(gateway: str) -> str:
    """A gateway is asked to send what it holds."""
    return f"flush.{gateway}"


@message
class Revision(NamedTuple):
    """The last change of one topic. Revisions of two epochs cannot be compared."""

    epoch: str = ""
    """Names the shard's process."""
    number: int = 0

    def covers(self, other: "Revision") -> bool:
        """Whoever asks for what is newer than this one hears of all that is newer than the other."""
        return self.epoch == other.epoch and self.number <= other.number


UNSEEN = Revision()
"""Whoever has seen nothing is answered at once."""


@message
class NewsItem(NamedTuple):
    revision: Revision
    value: Any = None


Seen: TypeAlias = Mapping[str, Revision]
"""By topic."""
News: TypeAlias = Mapping[str, NewsItem]
"""By topic: those that are not as they were seen. None after a timeout."""
WaitNews: TypeAlias = Callable[[str, Seen, float], Awaitable[News]]
"""Answers a question of somebody, whom the text names, after so many seconds at the latest. A later question of the
same asker ends the earlier one."""
