"""A pool that has nothing but trajectories to score: in memory, with switches for what can go wrong."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.scoring import Judgement, JudgementOutcome
from stepwell.steps.step import Step


class MemoryScoringPort:
    def __init__(self, trajectories: Sequence[list[Step]] = (), *, longest_lease: float = 60.0) -> None:
        self.waiting = {steps[0].trajectory_uid: steps for steps in trajectories}
        self.scores: dict[str, Judgement] = {}
        self.failures: list[Judgement] = []
        self.counted: Counter[str] = Counter()
        """How often a score counted, by trajectory."""
        self.takes = 0
        self.gives = 0
        self.refused = 0
        """Calls while it was down."""
        self.is_down = False
        self._longest_lease = longest_lease
        self._leases: dict[str, tuple[str, float]] = {}

    def put(self, steps: list[Step]) -> None:
        self.waiting[steps[0].trajectory_uid] = steps

    async def take_unscored(self, count: int, *, lease: float, timeout: float) -> tuple[str, list[list[Step]]] | None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            await self.check()
            free = [uid for uid in self.waiting if self._leases.get(uid, ("", 0.0))[1] < time.monotonic()][:count]
            if free:
                self.takes += 1
                ticket = f"ticket-{self.takes}"
                until = time.monotonic() + min(lease, self._longest_lease)
                self._leases.update(dict.fromkeys(free, (ticket, until)))
                return ticket, [self.waiting[uid] for uid in free]
            await asyncio.sleep(0.01)
        return None

    async def give_judgements(self, judgements: Sequence[Judgement]) -> list[bool]:
        await self.check()
        self.gives += 1
        return [self._settle(judgement) for judgement in judgements]

    async def check(self) -> None:
        if self.is_down:
            self.refused += 1
            raise PoolUnavailable("it is switched off")

    def _settle(self, judgement: Judgement) -> bool:
        uid = judgement.trajectory_uid
        if uid not in self.waiting or self._leases.get(uid, ("", 0.0))[0] != judgement.lease_uid:
            return False
        del self.waiting[uid]
        if judgement.outcome is not JudgementOutcome.SCORE:
            self.failures.append(judgement)
            return True
        self.scores[uid] = judgement
        self.counted[uid] += 1
        return True
