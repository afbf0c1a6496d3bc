"""Trajectories begin, move and end."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepwell.common.message_format import message
from stepwell.pool.api.producing import EndResult, RecordedTurn, Registration
from stepwell.pool.shard.operation import Operation, ShardRoute, TrajectoryOperation
from stepwell.steps.step import JsonObject

if TYPE_CHECKING:
    from stepwell.pool.shard.shard import Shard

TURN_WAIT = 0.5
"""Seconds that a call which continues a conversation waits for the step that another gateway holds."""


@message
@dataclass(frozen=True, slots=True)
class ChannelIfOpen(TrajectoryOperation[str | None]):
    """Is this trajectory registered, and not closed yet? The answer is its channel, or None."""

    gateway: str = ""
    """The gateway that serves the trajectory from now on."""
    may_ask_all = True

    def run(self, shard: "Shard") -> str | None:
        shard.attach(self.trajectory_uid, self.gateway)
        return shard.pool.ingest.channel_if_open(self.trajectory_uid, self.prompt_uid)


@message
@dataclass(frozen=True, slots=True)
class ChannelOf(TrajectoryOperation[str | None]):
    """The channel of a trajectory that the pool holds, open or ended; None if it holds no such one."""

    may_ask_all = True
    changes = False

    def run(self, shard: "Shard") -> str | None:
        return shard.pool.ingest.channel_of(self.trajectory_uid, self.prompt_uid)


@message
@dataclass(frozen=True, slots=True)
class Register(Operation[None]):
    registration: Registration
    route = ShardRoute.GROUP

    @property
    def routed_by(self) -> str:
        return self.registration.prompt_uid

    def is_elsewhere(self, shard: "Shard") -> bool:
        return shard.pool.ingest.is_elsewhere(self.registration)

    def run(self, shard: "Shard") -> None:
        shard.transactions.check_room()
        shard.pool.ingest.register(self.registration)
        shard.attach(self.registration.trajectory_uid, self.registration.gateway)


@message
@dataclass(frozen=True, slots=True)
class MoveTrajectory(TrajectoryOperation[Registration]):
    """An open trajectory without steps leaves its group. The answer registers it in the other one."""

    to_prompt_uid: str

    def run(self, shard: "Shard") -> Registration:
        return shard.pool.ingest.move(self.trajectory_uid, self.prompt_uid, self.to_prompt_uid)


@message
@dataclass(frozen=True, slots=True)
class Complete(TrajectoryOperation[EndResult]):
    reward: float | None
    failure: str = ""
    """How the policy failed; empty if it did not."""
    gateway: str = ""
    """The gateway that asks, which has flushed the trajectory. Without a name, the others are not waited for."""

    def run(self, shard: "Shard") -> EndResult:
        shard.check_flushed(self.trajectory_uid, self.gateway)
        return shard.pool.ingest.complete(self.trajectory_uid, self.prompt_uid, self.reward, self.failure)


@message
@dataclass(frozen=True, slots=True)
class Abort(TrajectoryOperation[EndResult]):
    def run(self, shard: "Shard") -> EndResult:
        return shard.pool.ingest.abort(self.trajectory_uid, self.prompt_uid)


@message
@dataclass(frozen=True, slots=True)
class FindTurns(TrajectoryOperation[list[RecordedTurn]]):
    """The steps that a call with this history may continue."""

    replied: str
    """The digest of the history."""
    gateway: str = ""
    """The gateway that asks. Others that may hold such a step are asked for it, unless this is empty."""
    may_ask_all = True
    changes = False
    flush_wait = TURN_WAIT
    is_patient = False

    def run(self, shard: "Shard") -> list[RecordedTurn]:
        found = shard.pool.ingest.turns(self.trajectory_uid, self.prompt_uid, self.replied)
        if not found:
            shard.check_flushed(self.trajectory_uid, self.gateway)
        return found


@message
@dataclass(frozen=True, slots=True)
class FindStepExtras(TrajectoryOperation[dict[str, JsonObject]]):
    """What the steps of a trajectory have under this name in their extras, by the steps' uids."""

    name: str
    uid: str
    """A step that must be among them."""
    gateway: str = ""
    """As in FindTurns."""
    may_ask_all = True
    changes = False
    flush_wait = TURN_WAIT
    is_patient = False

    def run(self, shard: "Shard") -> dict[str, JsonObject]:
        found = shard.pool.ingest.step_extras(self.trajectory_uid, self.prompt_uid, self.name)
        if self.uid not in found:
            shard.check_flushed(self.trajectory_uid, self.gateway)
        return found
