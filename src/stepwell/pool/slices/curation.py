"""People decide about trajectories, and read what was decided."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from stepwell.common.message_format import message
from stepwell.pool.api.curation import (
    BY_A_PERSON,
    AuditEntry,
    AuditPage,
    Curation,
    CurationAction,
    CurationOutcome,
)
from stepwell.pool.api.producing import RewardGiven
from stepwell.pool.shard.operation import MergedOperation, Operation, ShardRoute

if TYPE_CHECKING:
    from stepwell.pool.shard.shard import Shard


@message
@dataclass(frozen=True, slots=True)
class Curate(Operation[CurationOutcome]):
    curation: Curation
    route = ShardRoute.GROUP

    @property
    def routed_by(self) -> str:
        return self.curation.prompt_uid

    def is_elsewhere(self, shard: "Shard") -> bool:
        return shard.pool.ownership.is_elsewhere(self.curation.trajectory_uid, self.curation.prompt_uid)

    def run(self, shard: "Shard") -> CurationOutcome:
        curator, curation = shard.pool.curator, self.curation
        repeated = curator.repeats(curation)
        outcome = curator.curate(curation)
        if outcome is CurationOutcome.LATE and curation.action is CurationAction.RELABEL and not repeated:
            shard.keep_late(reward_of_relabel(curation))
        return outcome


@message
@dataclass(frozen=True, slots=True)
class ReadAudit(MergedOperation[list[AuditEntry], AuditPage]):
    """The last decisions, newest first."""

    limit: int
    trajectory_uid: str | None = None
    changes = False
    over_network = True

    def run(self, shard: "Shard") -> list[AuditEntry]:
        return shard.pool.curator.audit(self.limit, self.trajectory_uid)

    def merge(self, parts: Mapping[str, list[AuditEntry]], missing: tuple[str, ...]) -> AuditPage:
        entries = (entry for part in parts.values() for entry in part)
        return AuditPage(sorted(entries, key=attrgetter("at"), reverse=True)[: self.limit], missing)


def reward_of_relabel(relabel: Curation) -> RewardGiven:
    """The reward in a person's relabel of a trajectory that is gone."""
    assert relabel.reward is not None, "a relabel has a reward"
    return RewardGiven(
        trajectory_uid=relabel.trajectory_uid,
        prompt_uid=relabel.prompt_uid,
        value=relabel.reward,
        source=BY_A_PERSON + relabel.by,
        notes=relabel.why,
    )
