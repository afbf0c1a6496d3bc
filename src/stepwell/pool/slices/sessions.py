"""Which trajectory the calls of a session belong to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepwell.common.message_format import message
from stepwell.pool.api.sessions import SessionCall, SessionPlace
from stepwell.pool.shard.operation import MergedOperation, Operation, ShardRoute

if TYPE_CHECKING:
    from stepwell.pool.shard.shard import Shard


@message
@dataclass(frozen=True, slots=True)
class PlaceSession(Operation[SessionPlace | None]):
    call: SessionCall
    route = ShardRoute.GROUP

    @property
    def routed_by(self) -> str:
        return self.call.prompt_uid

    def is_elsewhere(self, shard: "Shard") -> bool:
        return shard.pool.sessions.is_elsewhere(self.call)

    def run(self, shard: "Shard") -> SessionPlace | None:
        if self.call.opens:
            shard.check_room()
        place = shard.pool.sessions.place(self.call)
        if place is not None and self.call.opens:
            shard.attach(place.trajectory_uid, self.call.gateway)
        return place


@message
@dataclass(frozen=True, slots=True)
class FindSession(MergedOperation[str, str]):
    """The id of this user's session that has a step whose conversation has this digest; empty if there is none."""

    user: str
    replied: str
    changes = False
    over_network = True

    def run(self, shard: "Shard") -> str:
        return shard.pool.state.sessions.find_by_turn(self.user, self.replied)

    def merge(self, parts: Mapping[str, str], missing: tuple[str, ...]) -> str:
        return next(filter(None, parts.values()), "")
