"""What gateways and reward workers ask of a shard: trajectories and sessions begin, move and end; their calls are
announced; steps, rewards and judgements arrive.

A call is announced before it is answered, so that a rollout whose gateway died does not pass for a whole one.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepwell.common.message_format import message
from stepwell.pool.api.producing import (
    CallBegun,
    EndResult,
    RecordedTurn,
    Registration,
    Requests,
    RewardGiven,
    SubmitVerdict,
)
from stepwell.pool.api.scoring import Judgement, JudgementOutcome
from stepwell.pool.api.sessions import SessionCall, SessionPlace
from stepwell.pool.shard.operation import MergedOperation, Operation, ShardRoute, TrajectoryOperation
from stepwell.steps.columns import Columns
from stepwell.steps.step import JsonObject

if TYPE_CHECKING:
    from stepwell.pool.shard.shard import Shard

ANNOUNCING = 0.05
"""Seconds in which announcements are gathered."""

TURN_WAIT = 0.5
"""Seconds that a call which continues a conversation waits for the step that another gateway holds."""

log = logging.getLogger("stepwell.pool")


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
        shard.check_room()
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
        return shard.pool.state.is_elsewhere(self.call.trajectory_uid, self.call.prompt_uid)

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


@message
@dataclass(frozen=True, slots=True, eq=False)
class AddSteps(Operation[list[SubmitVerdict]]):
    """One verdict for each step."""

    steps: Columns
    channel: str | None = None
    group_size: int | None = None
    route = ShardRoute.GROUP
    is_large = True

    @property
    def nbytes(self) -> int:
        return self.steps.added.nbytes + self.steps.logprobs.nbytes + self.steps.mask.nbytes

    def run(self, shard: "Shard") -> list[SubmitVerdict]:
        shard.check_room()
        return shard.pool.ingest.submit(self.steps, channel=self.channel, group_size=self.group_size)


@message
@dataclass(frozen=True, slots=True, eq=False)
class AddGroups(Operation[list[SubmitVerdict]]):
    """The trajectories are registered with it. One verdict for each step."""

    steps: Columns
    registrations: Sequence[Registration]
    route = ShardRoute.GROUP
    is_large = True

    @property
    def nbytes(self) -> int:
        return self.steps.added.nbytes + self.steps.logprobs.nbytes + self.steps.mask.nbytes

    def run(self, shard: "Shard") -> list[SubmitVerdict]:
        shard.check_room()
        return shard.pool.ingest.submit_groups(self.steps, self.registrations)


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
    """The gateway that asks. The field means the same as in FindTurns."""
    may_ask_all = True
    changes = False
    flush_wait = TURN_WAIT
    is_patient = False

    def run(self, shard: "Shard") -> dict[str, JsonObject]:
        found = shard.pool.ingest.step_extras(self.trajectory_uid, self.prompt_uid, self.name)
        if self.uid not in found:
            shard.check_flushed(self.trajectory_uid, self.gateway)
        return found


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
class GiveReward(Operation[bool]):
    """True if the reward is kept: for training or, if its trajectory was already shipped, in the archive.

    The reward of a step waits until the other gateways of the trajectory have sent what they hold of it.
    """

    reward: RewardGiven
    route = ShardRoute.GROUP

    @property
    def routed_by(self) -> str:
        return self.reward.prompt_uid

    def is_elsewhere(self, shard: "Shard") -> bool:
        return shard.pool.state.is_elsewhere(self.reward.trajectory_uid, self.reward.prompt_uid)

    def run(self, shard: "Shard") -> bool:
        reward, pool = self.reward, shard.pool
        if reward.step_index is not None:
            shard.check_flushed(reward.trajectory_uid, reward.gateway)
        if pool.state.tombstones.has_name(reward.trajectory_uid, reward.prompt_uid):
            return False
        kept, known = pool.ingest.reward(reward), pool.state.trajectories.get(reward.trajectory_uid)
        has_that_of_a_person = known is not None and known.is_relabelled
        return kept or (not has_that_of_a_person and shard.keep_late(reward))


@message
@dataclass(frozen=True, slots=True)
class TakeUnscored(Operation[Columns | None]):
    """All steps of up to `count` trajectories that lack a reward, under a reward lease of this name. Those that are not
    judged in `lease` seconds come back."""

    count: int
    lease: float
    lease_uid: str
    by_step: bool = False
    route = ShardRoute.NAMED

    def run(self, shard: "Shard") -> Columns | None:
        expires_at = shard.pool_time() + self.lease
        return shard.pool.rewards_due.take(self.count, self.lease_uid, expires_at, by_step=self.by_step)


@message
@dataclass(frozen=True, slots=True)
class GiveJudgements(Operation[list[bool]]):
    """For each judgement, whether it counted."""

    judgements: Sequence[Judgement]
    route = ShardRoute.NAMED

    def run(self, shard: "Shard") -> list[bool]:
        failed = [one for one in self.judgements if one.attempt.outcome is not JudgementOutcome.SCORE]
        if failed:
            first = failed[0]
            text = "%d of %d trajectories could not be scored now; the first, %s, by %s: %s: %s"
            details = (first.trajectory_uid, first.source, first.attempt.outcome, first.attempt.why)
            log.warning(text, len(failed), len(self.judgements), *details)
        return shard.pool.rewards_due.settle(self.judgements)
