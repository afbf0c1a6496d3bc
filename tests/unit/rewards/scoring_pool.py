"""A pool in the test's own process whose trajectories wait for a reward, and what became of their judgements."""

import time
from collections import Counter
from collections.abc import Sequence

from rig.local_pool import LocalPool
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.api.scoring import Judgement, JudgementOutcome
from stepwell.steps.step import Step


class ScoringPool(LocalPool):
    def __init__(self, trajectories: Sequence[Sequence[Step]] = ()) -> None:
        super().__init__(clock=time.time, require_reward=True, reward_attempts=1, max_queue_size=10_000)
        self.scores: dict[str, Judgement] = {}
        self.failures: list[Judgement] = []
        self.counted: Counter[str] = Counter()
        """How often a score counted, by trajectory."""
        self.takes = 0
        self.gives = 0
        self.refused = 0
        """Calls while it was away."""
        for steps in trajectories:
            self.put(steps)

    @property
    def unscored(self) -> int:
        scoring = self.rules.stats().scoring
        return scoring.waiting + scoring.under_way + scoring.resting

    def put(self, steps: Sequence[Step]) -> None:
        uid, prompt = steps[0].trajectory_uid, steps[0].prompt_uid
        self.rules.register(Registration(uid, prompt))
        assert self.rules.submit(steps) == [SubmitVerdict.ACCEPTED] * len(steps)
        assert self.rules.complete(uid, prompt) is EndResult.COMPLETED

    async def take_unscored(
        self, count: int, *, lease: float, timeout: float, by_step: bool = False
    ) -> tuple[str, list[list[Step]]] | None:
        try:
            taken = await super().take_unscored(count, lease=lease, timeout=timeout, by_step=by_step)
        except PoolUnavailable:
            self.refused += 1
            raise
        self.takes += taken is not None
        return taken

    async def give_judgements(self, judgements: Sequence[Judgement]) -> list[bool]:
        if self.away:
            self.refused += 1
            raise PoolUnavailable("the pool is away")
        counted = await super().give_judgements(judgements)
        self.gives += 1
        for judgement, counts in zip(judgements, counted, strict=True):
            if judgement.attempt.outcome is not JudgementOutcome.SCORE:
                self.failures.append(judgement)
            elif counts:
                self.scores[judgement.trajectory_uid] = judgement
                self.counted[judgement.trajectory_uid] += 1
        return counted
