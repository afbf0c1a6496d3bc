"""Operations: what is asked of a pool, as values.

- An operation says which shards it goes to, and has the code that runs there, within one transaction of the shard.
- A message to a shard carries many of them. Each gets an answer or an exception of its own.
- A new one is a class in a module of pool/slices. Nothing else needs to know of it; only a new module has a place in
  HOMES of common/message_codec.py, so that a link finds its classes. Through Ray, any class that the shard can import
  is run.
- One whose feature has state of its own has a Slice in the same module (pool/state/slice.py).

    @message
    @dataclass(frozen=True, slots=True)
    class PauseChannel(Operation[Serving]):
        channel: str
        paused: bool
        route = ShardRoute.FIRST

        def run(self, shard: Shard) -> Serving: ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from stepwell.pool.api.producing import FLUSH_WAIT

if TYPE_CHECKING:
    from stepwell.pool.shard.shard import Shard

R = TypeVar("R")
P = TypeVar("P")


class ShardRoute(Enum):
    """Which shards an operation goes to."""

    GROUP = "group"
    """The one that has the group of its `prompt_uid`, or may open it."""
    FIRST = "first"
    """The one that knows what serves the policy."""
    ALL = "all"
    """All that answer soon; their answers are merged."""
    NAMED = "named"
    """The one that the client names, whatever the layout of the shards."""


class Operation(Generic[R]):
    """`ask` answers with R."""

    __slots__ = ()
    route: ClassVar[ShardRoute]
    may_ask_all: ClassVar[bool] = False
    """While the shards change, all that may have the group are asked at once: it opens none."""
    is_large: ClassVar[bool] = False
    """It leaves in a message of its own."""
    changes: ClassVar[bool] = True
    """It is run within a transaction."""
    over_network: ClassVar[bool] = False
    """A link over a network carries it for gateways, dashboards and Atropos servers, though it is about no group."""
    patience: ClassVar[float] = 0.0
    """Seconds that it may wait for others to share its message. Somebody waits for the answer of one that has none."""
    flush_wait: ClassVar[float] = FLUSH_WAIT
    """Seconds that it waits for other gateways, where it raises FlushNeeded."""
    is_patient: ClassVar[bool] = True
    """If they have not flushed by then, it fails. Otherwise it answers with what is there."""

    @property
    def nbytes(self) -> int:
        """About what it adds to a message."""
        return 200

    @property
    def routed_by(self) -> str:
        """The prompt_uid of its group, for ShardRoute.GROUP."""
        raise NotImplementedError

    def run(self, shard: "Shard") -> Any:
        """The answer R; of all shards, this one's part of it. FlushNeeded if another gateway must send first what it
        holds."""
        raise NotImplementedError

    def is_elsewhere(self, shard: "Shard") -> bool:
        """Another shard has what it is about."""
        return False


@dataclass(frozen=True, slots=True)
class TrajectoryOperation(Operation[R]):
    trajectory_uid: str
    prompt_uid: str
    route = ShardRoute.GROUP

    @property
    def routed_by(self) -> str:
        return self.prompt_uid

    def is_elsewhere(self, shard: "Shard") -> bool:
        return shard.pool.state.is_elsewhere(self.trajectory_uid, self.prompt_uid)


class MergedOperation(Operation[R], Generic[P, R]):
    """Asks all shards, and merges their answers."""

    __slots__ = ()
    route = ShardRoute.ALL

    def run(self, shard: "Shard") -> P:
        raise NotImplementedError

    def merge(self, parts: Mapping[str, P], missing: tuple[str, ...]) -> R:
        """`parts` are by the name of the shard; `missing` are those that did not answer in time."""
        raise NotImplementedError


class LongOperation(Generic[P]):
    """Asked of all shards, and answered when its work is done, in many transactions of each. So it shares no message
    with others, and `run` of a shard refuses it; no link over a network carries it."""

    __slots__ = ()

    async def run(self, shard: "Shard") -> P:
        raise NotImplementedError

    def again(self, parts: Sequence[P]) -> Self | None:
        """What all shards are asked next, because of what the others have answered; None if that is all."""
        return None
