"""Reward workers take what lacks a reward, and give their judgements."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepwell.common.message_format import message
from stepwell.pool.api.scoring import Judgement, JudgementOutcome
from stepwell.pool.shard.operation import Operation, ShardRoute
from stepwell.steps.columns import Columns

if TYPE_CHECKING:
    from stepwell.pool.shard.shard import Shard

log = logging.getLogger("stepwell.pool")


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
