"""Recorded rollouts, in the three forms in which trainers get them: a filled pool, batches, and plain rows.

- A group is kept if its rollouts did differently well, are not all the same, and each is one row: every trainer then
  gets the same number of samples an update, whatever it does with groups from which nothing can be learned. From
  rollouts that are the same nothing is learned either: what one teaches, another takes back.
- A plain row needs nothing of Stepwell to be trained.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from stepwell.trainers.trl_groups import row_samples

from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.client import PoolClient
from stepwell.pool.client.batch import Batch, make_batch
from stepwell.steps.columns import pack
from stepwell.steps.returns import GivenReward
from stepwell.steps.step import BoolArray, FloatArray, IntArray, Step
from stepwell.trainers.rows import choose_rows

TOGETHER = 16
"""Groups in a message to the pool."""


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    steps: tuple[Step, ...]
    reward: float


@dataclass(frozen=True, slots=True, eq=False)
class PlainRow:
    """A rollout as a row of tokens. The arrays have one entry per token."""

    ids: IntArray
    trained: BoolArray
    logprobs: FloatArray
    """When they were sampled; 0 where nothing is trained."""
    advantage: float
    reward: float
    group: int


@dataclass(frozen=True, slots=True)
class Recording:
    groups: Sequence[Sequence[RecordedRollout]]

    def batch(self, groups: int, number: int) -> Batch:
        """The batch of that number, if each has so many groups."""
        taken = self.groups[number * groups : (number + 1) * groups]
        steps = [[*chain.from_iterable(_scored(rollout) for rollout in group)] for group in taken]
        return make_batch(pack([*chain.from_iterable(steps)]), [len(of_group) for of_group in steps])

    def rows(self) -> Iterator[PlainRow]:
        """In the order in which a pool gives the groups."""
        for number in range(len(self.groups)):
            batch = self.batch(1, number)
            rows = choose_rows(batch, ())
            for sample in row_samples(rows):
                yield PlainRow(
                    ids=sample.tokens,
                    trained=sample.trained,
                    logprobs=np.where(sample.trained, sample.logprobs, np.float32(0.0)),
                    advantage=sample.advantage,
                    reward=float(rows.merged.rewards_R[sample.row]),
                    group=number,
                )

    async def fill(self, pool: PoolClient, channel: str) -> None:
        """Puts all of it into a channel; names are new in every channel."""
        for first in range(0, len(self.groups), TOGETHER):
            steps: list[Step] = []
            registrations: list[Registration] = []
            for group in self.groups[first : first + TOGETHER]:
                for rollout in group:
                    named = [_renamed(step, channel) for step in rollout.steps]
                    uid, prompt = named[0].trajectory_uid, named[0].prompt_uid
                    steps += named
                    registrations.append(
                        Registration(uid, prompt, channel, len(group), outcome=GivenReward(rollout.reward))
                    )
            verdicts = await pool.submit_groups(steps, registrations)
            assert set(verdicts) == {SubmitVerdict.ACCEPTED}, set(verdicts)


def learnable_groups(batch: Batch) -> Iterator[list[RecordedRollout]]:
    """Those of a batch that are kept."""
    trajectories, merged = batch.trajectories(), batch.merged()
    rows_T = np.bincount(merged.trajectory_of_R, minlength=len(trajectories))
    for group in range(len(batch)):
        members = np.flatnonzero(batch.group_of_T == group).tolist()
        returns = batch.returns_T[members]
        answers = {b"".join(step.response_ids.tobytes() for step in trajectories[t]) for t in members}
        is_scored = len(np.unique(returns)) > 1 and not np.isnan(returns).any()
        if is_scored and len(answers) > 1 and (rows_T[members] == 1).all():
            yield [RecordedRollout(_plain_steps(trajectories[t]), float(batch.returns_T[t])) for t in members]


def _plain_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """What was sampled, without what the pool has added."""
    return tuple(
        Step(
            prompt_ids=step.prompt_ids.copy(),
            response_ids=step.response_ids.copy(),
            response_logprobs=None if step.response_logprobs is None else step.response_logprobs.copy(),
            trajectory_uid=step.trajectory_uid,
            prompt_uid=step.prompt_uid,
            step_index=index,
            is_last=index == len(steps) - 1,
            exactness=step.exactness,
            finish_reason=step.finish_reason,
            temperature=step.temperature,
        )
        for index, step in enumerate(steps)
    )


def _scored(rollout: RecordedRollout) -> list[Step]:
    *before, last = rollout.steps
    return [*before, replace(last, reward=rollout.reward)]


def _renamed(step: Step, channel: str) -> Step:
    return replace(step, trajectory_uid=f"{channel}-{step.trajectory_uid}", prompt_uid=f"{channel}-{step.prompt_uid}")
