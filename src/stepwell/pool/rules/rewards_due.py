"""What reward workers do: take complete trajectories that lack a reward, and give their judgements of them.

What always holds: a trajectory is with one worker at a time; a judgement counts once, and only while what was judged is
still unscored and unchanged; what a worker does not answer for in time is offered again, before all that is younger; a
failure never becomes a number. Errands need no journal: after a restart all that is unscored is offered.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepwell.pool.api.plan import OnRewardFailure
from stepwell.pool.api.scoring import Judgement, JudgementOutcome, Score
from stepwell.pool.api.stats import ScoringStats
from stepwell.pool.state.channel_index import ChannelIndex
from stepwell.pool.state.pool_state import PoolState
from stepwell.pool.state.priority_set import PrioritySet
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.shipment import ship, trajectory_rows
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.columns import Columns

RESTING, GIVEN_UP = "resting", "given up"
"""Stand in a ticket's place: the last attempt failed and the next may not begin yet, or there is none left."""
REST, LONGEST_REST = 1.0, 60.0
"""Seconds from the first failure to the next attempt, doubled with each one, for a judge may be down for a while."""
REWARD_FAILED = "reward_failed"
"""The cause under which is dropped what could not be scored."""
WHY_KEPT = 300
"""Characters of the last failure's reason that are told with it."""


@dataclass(frozen=True, slots=True)
class RewardLease:
    """What a worker was given under one ticket, and has not answered for."""

    expires_at: float
    uids: dict[str, None]
    """In order. Some may have changed or gone since: a trajectory's own ticket tells."""


class RewardsDue:
    def __init__(self, books: PoolState) -> None:
        self._books = books
        self._errands: dict[str, RewardLease] = {}
        """By ticket."""
        self._expiry: PrioritySet[tuple[float, str]] = PrioritySet()
        self._resting: PrioritySet[tuple[float, str]] = PrioritySet()

    def has_work(self) -> bool:
        return any(channel.unscored for channel in self._books.channels.values())

    def take(self, count: int, ticket: str, expires_at: float) -> Columns | None:
        """All held steps of up to `count` trajectories, oldest first, whatever their channel; None if there are none.

        Asking again under the same ticket gives the same again: an answer may be lost on its way.
        """
        if ticket not in self._errands:
            self._begin(ticket, expires_at, self._oldest(count))
        rows = [row for taken in self._under(ticket) for row in trajectory_rows(taken, StoredStep.is_held)]
        return ship(rows) if rows else None

    def settle(self, judgements: Sequence[Judgement]) -> list[bool]:
        """Whether each counted. One does not whose trajectory was scored, changed, dropped or offered again since."""
        return [self._settle(judgement) for judgement in judgements]

    def expire(self) -> None:
        """Offer again what was not answered for in time, and what has rested."""
        now = self._books.now
        while (first := self._expiry.first()) is not None and first[0] <= now:
            unanswered = self._under(first[1])
            self._end(first[1])
            self._offer(unanswered)
        while (first := self._resting.first()) is not None and first[0] <= now:
            self._resting.discard(first)
            self._offer(self._with_ticket(RESTING, [first[1]]))

    def stats(self) -> ScoringStats:
        counters = self._books.counters
        return ScoringStats(
            waiting=sum(len(channel.unscored) for channel in self._books.channels.values()),
            under_way=sum(len(self._under(ticket)) for ticket in self._errands),
            resting=len(self._with_ticket(RESTING, {uid for _, uid in self._resting})),
            scored=counters.scored,
            failed=counters.failed_judgements.copy(),
            late=counters.late_judgements,
        )

    # -- errands -------------------------------------------------------------------------------------------------------

    def _oldest(self, count: int) -> list[Trajectory]:
        keys = (key for channel in self._books.channels.values() for key in channel.unscored.smallest(count))
        return [self._books.trajectories[uid] for *_, uid in heapq.nsmallest(count, keys)]

    def _begin(self, ticket: str, expires_at: float, chosen: Sequence[Trajectory]) -> None:
        if chosen:
            self._errands[ticket] = RewardLease(expires_at, dict.fromkeys(trajectory.uid for trajectory in chosen))
            self._expiry.add((expires_at, ticket))
        for trajectory in chosen:
            self._set_ticket(trajectory, ticket)

    def _end(self, ticket: str) -> None:
        self._expiry.discard((self._errands.pop(ticket).expires_at, ticket))

    def _under(self, ticket: str) -> list[Trajectory]:
        errand = self._errands.get(ticket)
        return [] if errand is None else self._with_ticket(ticket, errand.uids)

    def _with_ticket(self, ticket: str, uids: Iterable[str]) -> list[Trajectory]:
        known = self._books.trajectories
        return [known[uid] for uid in uids if uid in known and known[uid].ticket == ticket]

    def _offer(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            self._set_ticket(trajectory, None)

    def _set_ticket(self, trajectory: Trajectory, ticket: str | None) -> None:
        trajectory.ticket = ticket
        self._channel(trajectory).queue_unscored(trajectory)

    def _channel(self, trajectory: Trajectory) -> ChannelIndex:
        return self._books.channels[trajectory.group.channel]

    # -- judgements ----------------------------------------------------------------------------------------------------

    def _settle(self, judgement: Judgement) -> bool:
        uid, ticket, counters = judgement.trajectory_uid, judgement.lease_uid, self._books.counters
        errand = self._errands.get(ticket)
        judged = self._with_ticket(ticket, [uid])
        if errand is None or not judged:
            counters.late_judgements += 1
            return False
        del errand.uids[uid]
        if not errand.uids:
            self._end(ticket)
        self._apply(judged[0], judgement)
        return True

    def _apply(self, trajectory: Trajectory, judgement: Judgement) -> None:
        steps = [row.step for row in trajectory_rows(trajectory, StoredStep.is_held)]
        score = judgement.score
        if judgement.outcome is JudgementOutcome.SCORE and score is not None and _fits(score, len(steps)):
            self._books.counters.scored += 1
            self._reward(trajectory, steps, score, judgement.source)
        else:
            failure = JudgementOutcome.ERROR if judgement.outcome is JudgementOutcome.SCORE else judgement.outcome
            self._books.counters.failed_judgements[failure] += 1
            self._fail(trajectory, judgement.why)

    def _reward(self, trajectory: Trajectory, steps: Sequence[StoredStep], score: Score, source: str) -> None:
        self._books.reward(trajectory, score.rest, source)
        for step, value in zip(steps, score.step_rewards, strict=False):
            if value is not None:
                self._books.reward_step(trajectory, step, value, source)
        self._books.explain_reward(trajectory, parts=dict(score.parts), notes=score.notes)
        self._channel(trajectory).place(trajectory.group)

    def _fail(self, trajectory: Trajectory, why: str) -> None:
        limits = self._books.limits
        trajectory.failures += 1
        if trajectory.failures < limits.reward_attempts:
            rest = min(LONGEST_REST, REST * 2.0 ** min(trajectory.failures - 1, 10))
            self._resting.add((self._books.now + rest, trajectory.uid))
            self._set_ticket(trajectory, RESTING)
        elif limits.on_reward_failure is OnRewardFailure.KEEP:
            self._set_ticket(trajectory, GIVEN_UP)
        elif limits.on_reward_failure is OnRewardFailure.DROP:
            self._books.drop_trajectory(trajectory, REWARD_FAILED, why[:WHY_KEPT])
        else:
            self._books.drop_group(trajectory.group, REWARD_FAILED, why[:WHY_KEPT])


def _fits(score: Score, steps: int) -> bool:
    """Is it a score for so many steps, with finite numbers throughout?"""
    numbers = [score.value, *(reward for reward in score.step_rewards if reward is not None)]
    return len(score.step_rewards) in (0, steps) and all(map(math.isfinite, numbers))
