"""Gateways announce calls before they answer them, so that a rollout whose gateway died does not pass for a whole
one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepwell.common.message_format import message
from stepwell.pool.api.producing import CallBegun, Requests
from stepwell.pool.shard.operation import Operation, ShardRoute, TrajectoryOperation

if TYPE_CHECKING:
    from stepwell.pool.shard.shard import Shard

ANNOUNCING = 0.05
"""Seconds in which announcements are gathered."""


@message
@dataclass(frozen=True, slots=True)
class BeginCall(Operation[None]):
    """The gateway has asked an engine. An unknown trajectory is none of this shard's: nothing is noted."""

    call: CallBegun
    route = ShardRoute.GROUP
    may_ask_all = True
    patience = ANNOUNCING

    @property
    def routed_by(self) -> str:
        return self.call.prompt_uid

    def is_elsewhere(self, shard: "Shard") -> bool:
        return shard.pool.ownership.is_elsewhere(self.call.trajectory_uid, self.call.prompt_uid)

    def run(self, shard: "Shard") -> None:
        shard.attach(self.call.trajectory_uid, self.call.gateway)
        shard.pool.state.begin_call(self.call)


@message
@dataclass(frozen=True, slots=True)
class EndCall(TrajectoryOperation[None]):
    """No step of this call will come. Its step is lost, or it has none: then nothing is missing."""

    uid: str
    is_lost: bool = False
    may_ask_all = True
    patience = ANNOUNCING

    def run(self, shard: "Shard") -> None:
        shard.pool.state.end_call(self.trajectory_uid, self.uid, is_lost=self.is_lost)


@message
@dataclass(frozen=True, slots=True)
class TellCalls(Operation[None]):
    """All calls of a gateway whose steps the pool may lack, also those of trajectories of other shards."""

    gateway: str
    calls: Sequence[CallBegun]
    route = ShardRoute.NAMED
    over_network = True

    def run(self, shard: "Shard") -> None:
        shard.note_told(self.gateway, self.calls)


@message
@dataclass(frozen=True, slots=True)
class TakeRequests(Operation[Requests]):
    """The gateway lives, and asks what it has to send. It was called."""

    gateway: str
    since: float
    """Seconds from the answer to the last one until this one was made."""
    has_told: bool
    """The shard knows its calls, and will know those that end in the next GAP seconds before their answers end."""
    route = ShardRoute.NAMED
    over_network = True

    def run(self, shard: "Shard") -> Requests:
        shard.note_gateway(self.gateway)
        return shard.gateways.take_requests(self.gateway, self.since, has_told=self.has_told)


@message
@dataclass(frozen=True, slots=True)
class ShowItself(TakeRequests):
    """The same without a call: nobody waits for it."""

    patience = ANNOUNCING


@message
@dataclass(frozen=True, slots=True)
class MarkUnseen(TrajectoryOperation[None]):
    """What is known of who read these steps. They may arrive later; it may be sent again."""

    step_uids: Sequence[str]
    reason: str
    """UNSEEN, READ, NOT_CONTINUED or CONTINUED."""

    def run(self, shard: "Shard") -> None:
        shard.pool.ingest.mark_unseen(self.trajectory_uid, self.prompt_uid, self.step_uids, self.reason)
