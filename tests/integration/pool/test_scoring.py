"""Reward workers at a DataPool of several actors: every trajectory is scored once, whoever is killed."""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

from rig.actors import pid_of
from rig.builders import make_step
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.api.scoring import Attempt, Judgement, JudgementOutcome, Score
from stepwell.pool.client import PoolClient
from stepwell.steps.step import Step
from tests.integration.pool.conftest import started

LIMITS = Limits(require_reward=True)


async def rollout(client: PoolClient, uid: str, reward: float | None = None) -> None:
    await client.register_trajectory(Registration(uid, f"p-{uid}"))
    assert await client.submit_steps([make_step(uid, f"p-{uid}", uid=uid)]) == [SubmitVerdict.ACCEPTED]
    assert await client.complete_trajectory(uid, f"p-{uid}", reward) is EndResult.COMPLETED


def judgement(lease_uid: str, step: Step, outcome: JudgementOutcome = JudgementOutcome.SCORE) -> Judgement:
    """The score of `t7` is 7."""
    score = Score(float(step.trajectory_uid[1:])) if outcome is JudgementOutcome.SCORE else None
    return Judgement(
        trajectory_uid=step.trajectory_uid,
        prompt_uid=step.prompt_uid,
        lease_uid=lease_uid,
        attempt=Attempt(outcome, score),
        source="test",
    )


async def work(client: PoolClient, counted: Counter[str]) -> None:
    """A worker that is at times slower than its lease, and fails now and then."""
    turn = 0
    while True:
        taken = await client.take_unscored(8, lease=2.0, timeout=1.0)
        if taken is None:
            continue
        lease_uid, trajectories = taken
        turn += 1
        outcomes = [
            JudgementOutcome.ERROR if turn % 5 == 0 and n == 0 else JudgementOutcome.SCORE
            for n in range(len(trajectories))
        ]
        made = [judgement(lease_uid, steps[0], how) for steps, how in zip(trajectories, outcomes, strict=True)]
        await asyncio.sleep(0.05)
        for judged, has_counted in zip(made, await client.give_judgements(made), strict=True):
            counted[judged.trajectory_uid] += has_counted and judged.attempt.outcome is JudgementOutcome.SCORE


async def test_while_shards_are_killed_two_workers_score_everything_and_nothing_twice(
    namespace: str, tmp_path: Path
) -> None:
    plan = PoolPlan(shards=2, journal=str(tmp_path), limits=Limits(require_reward=True, reward_attempts=10))
    client = started(plan, namespace)
    counted: Counter[str] = Counter()
    workers = [asyncio.create_task(work(PoolClient(plan.name, namespace), counted)) for _ in range(2)]
    total = 120
    for n in range(total):
        await rollout(client, f"t{n}")
        if n in (40, 80):
            victim = await asyncio.to_thread(pid_of, plan.shard_names()[n // 40 - 1], namespace)
            os.kill(victim, signal.SIGKILL)
    batch = await client.fetch_batch(total, timeout=240.0)
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    assert sorted(batch.columns.trajectory_uids) == sorted(f"t{n}" for n in range(total))
    scored = dict(zip(batch.columns.trajectory_uids, batch.columns.rewards_S.tolist(), strict=True))
    assert scored == {f"t{n}": float(n) for n in range(total)}
    assert batch.columns.reward_revisions_S.tolist() == [1] * total
    assert max(counted.values()) == 1
    stats = (await client.stats()).scoring
    assert (stats.scored, stats.waiting, stats.under_way, stats.resting) == (total, 0, 0, 0)
