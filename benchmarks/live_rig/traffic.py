"""Rollouts as gateways bring them, in a pool of this process: the real client and the real shard, without Ray."""

import random
from collections.abc import Sequence
from itertools import count

from benchmarks.live_rig.policy import Answer, LocalPolicy
from rig.local_pool import LocalPool
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.client import DataPool
from stepwell.steps.step import Exactness, Step, ids_array, logprobs_array


class LocalDataPool(DataPool):
    def __init__(self) -> None:
        self._local = LocalPool()
        super().__init__(self._local)

    def add(self, prompt_uid: str, answers: Sequence[Answer], rewards: Sequence[float]) -> None:
        """One whole group; a session is a group of one."""
        self._run(self._add(prompt_uid, answers, rewards))

    async def _add(self, prompt_uid: str, answers: Sequence[Answer], rewards: Sequence[float]) -> None:
        uids = [f"{prompt_uid}-{number}" for number in range(len(answers))]
        for uid in uids:
            await self._local.register_trajectory(Registration(uid, prompt_uid, group_size=len(uids)))
        steps = [_step(answer, uid, prompt_uid) for answer, uid in zip(answers, uids, strict=True)]
        verdicts = await self._local.submit_steps(steps)
        assert set(verdicts) == {SubmitVerdict.ACCEPTED}
        for uid, reward in zip(uids, rewards, strict=True):
            await self._local.complete_trajectory(uid, prompt_uid, reward)


class Traffic:
    """Users who ask for a random word each.

    `siblings`: how many rollouts one question gets. `rewards`: of a wrong answer, and of a right one.
    """

    def __init__(
        self,
        pool: LocalDataPool,
        policy: LocalPolicy,
        words: Sequence[str],
        siblings: int,
        rewards: tuple[float, float],
        seed: int,
    ) -> None:
        self._pool, self._policy, self._words, self._siblings, self._rewards = pool, policy, words, siblings, rewards
        self._random = random.Random(seed)
        self._numbers = count()

    def ask(self, rollouts: int) -> None:
        asked = self._random.choices(self._words, k=rollouts // self._siblings)
        answers = self._policy.answer([word for word in asked for _ in range(self._siblings)])
        for place in range(0, len(answers), self._siblings):
            group = answers[place : place + self._siblings]
            rewards = [self._rewards[answer.is_right] for answer in group]
            self._pool.add(f"asked-{next(self._numbers)}", group, rewards)


def _step(answer: Answer, uid: str, prompt_uid: str) -> Step:
    return Step(
        prompt_ids=ids_array(answer.prompt_ids),
        response_ids=ids_array(answer.response_ids),
        response_logprobs=logprobs_array(answer.logprobs),
        trajectory_uid=uid,
        prompt_uid=prompt_uid,
        uid=f"{uid}-step",
        exactness=Exactness.ENGINE,
        temperature=1.0,
    )
