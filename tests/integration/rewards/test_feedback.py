"""Rewards that people give, during a trajectory, after it, and long after it."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray
from openai import OpenAI
from stepwell.pool.actors import start_pool

import stepwell
from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.threads import in_thread
from stepwell.errors import BadRequest, Conflict, NotPermitted, UnknownTrajectory
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.client import DataPool, PoolClient

KEY = "a-control-key-of-the-tests"


@asynccontextmanager
async def serving(pool: LocalPool | PoolClient, *keys: str) -> AsyncIterator[str]:
    async with FakeEngine() as engine, serve_gateway(pool, [engine.url], control_keys=keys) as url:
        yield url


@pytest.fixture
def pool() -> LocalPool:
    return LocalPool(require_reward=True)


@pytest.fixture
def run(pool: LocalPool) -> Iterator[stepwell.Run]:
    with in_thread(serving(pool)) as url:
        yield stepwell.connect(url)


def ask(client: OpenAI) -> None:
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])


def rollout(run: stepwell.Run, *, turns: int = 1) -> stepwell.TrajectoryContext:
    with run.trajectory() as t, OpenAI(base_url=t.base_url, api_key=t.api_key) as client:
        for _ in range(turns):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
    return t


def test_a_thumb_up_is_the_reward_that_was_waited_for(pool: LocalPool, run: stepwell.Run) -> None:
    t = rollout(run)
    assert run.feedback(t.trajectory_uid, t.prompt_uid, 1.0, source="thumbs", note="just what I needed") == "counted"
    (step,) = pool.taken()
    assert (step.reward, step.reward_source, step.reward_revision) == (1.0, "thumbs", 1)
    assert step.metadata["reward"] == {"notes": "just what I needed"}


def test_a_second_thought_is_the_next_revision(pool: LocalPool, run: stepwell.Run) -> None:
    t = rollout(run)
    run.feedback(t.trajectory_uid, t.prompt_uid, 1.0)
    assert run.feedback(t.trajectory_uid, t.prompt_uid, -1.0) == "counted"
    (step,) = pool.taken()
    assert (step.reward, step.reward_source, step.reward_revision) == (-1.0, "feedback", 2)


def test_feedback_can_be_for_one_step(pool: LocalPool, run: stepwell.Run) -> None:
    t = rollout(run, turns=3)
    assert run.feedback(t.trajectory_uid, t.prompt_uid, 0.5, step_index=1) == "counted"
    assert [step.reward for step in pool.taken()] == [None, 0.5, None]
    with pytest.raises(Conflict, match="has no step 7"):
        t = rollout(run)
        run.feedback(t.trajectory_uid, t.prompt_uid, 0.5, step_index=7)


def test_feedback_may_come_while_the_agent_is_at_work(pool: LocalPool, run: stepwell.Run) -> None:
    with run.trajectory() as t, OpenAI(base_url=t.base_url, api_key=t.api_key) as client:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
        assert run.feedback(t.trajectory_uid, t.prompt_uid, 0.5, step_index=0) == "counted"
    assert [step.reward for step in pool.taken()] == [0.5]


def test_feedback_after_the_training_is_late_where_nothing_keeps_it(pool: LocalPool, run: stepwell.Run) -> None:
    t = rollout(run)
    run.feedback(t.trajectory_uid, t.prompt_uid, 1.0)
    pool.taken()
    assert run.feedback(t.trajectory_uid, t.prompt_uid, 0.0) == "late"


def test_feedback_that_names_nothing_or_says_nothing_is_refused(run: stepwell.Run) -> None:
    t = rollout(run)
    with pytest.raises(UnknownTrajectory):
        run.feedback("nobody", t.prompt_uid, 1.0)
    with pytest.raises(BadRequest, match="nan"):
        run.feedback(t.trajectory_uid, t.prompt_uid, float("nan"))
    with pytest.raises(BadRequest, match="step_index"):
        run.feedback(t.trajectory_uid, t.prompt_uid, 1.0, step_index=-1)


def test_a_thumb_or_a_rating_is_for_the_last_step(pool: LocalPool, run: stepwell.Run) -> None:
    with run.trajectory() as t, OpenAI(base_url=t.base_url, api_key=t.api_key) as client:
        ask(client)
        assert run.feedback(t.trajectory_uid, t.prompt_uid, thumb="down", source="thumbs") == "counted"
        ask(client)
        assert run.feedback(t.trajectory_uid, t.prompt_uid, rating=4) == "counted"
        ask(client)
        assert run.feedback(t.trajectory_uid, t.prompt_uid, 0.25, step_index="last") == "counted"
    steps = pool.taken()
    assert [(step.reward, step.outcome_reward) for step in steps] == [(-1.0, None), (0.5, None), (0.25, None)]


def test_feedback_that_says_two_things_or_leaves_its_scale_is_refused(run: stepwell.Run) -> None:
    t = rollout(run)
    with pytest.raises(BadRequest, match="one of value, thumb and rating"):
        run.feedback(t.trajectory_uid, t.prompt_uid, 1.0, thumb="up")
    with pytest.raises(BadRequest, match="one of value, thumb and rating"):
        run.feedback(t.trajectory_uid, t.prompt_uid)
    with pytest.raises(BadRequest, match="on its scale"):
        run.feedback(t.trajectory_uid, t.prompt_uid, rating=7, scale=(0, 5))


def test_an_agent_cannot_praise_itself(pool: LocalPool) -> None:
    with in_thread(serving(pool, KEY)) as url:
        run = stepwell.connect(url, key=KEY)
        t = rollout(run)
        with pytest.raises(NotPermitted, match="this is for reward and admin"):
            stepwell.Run(url, t.api_key).feedback(t.trajectory_uid, t.prompt_uid, 1.0)
        assert run.feedback(t.trajectory_uid, t.prompt_uid, 0.0) == "counted"


def test_feedback_after_the_training_is_kept_in_the_archive(namespace: str, tmp_path: Path) -> None:
    plan = PoolPlan(
        limits=Limits(require_reward=True), journal=str(tmp_path / "journal"), archive=str(tmp_path / "archive")
    )
    start_pool(plan, namespace)
    with in_thread(serving(PoolClient("data_pool", namespace))) as url:
        run = stepwell.connect(url)
        t = rollout(run)
        run.feedback(t.trajectory_uid, t.prompt_uid, 1.0)
        with DataPool(PoolClient("data_pool", namespace)).batch(1, timeout=60.0) as batch:
            assert batch.rewards_T.tolist() == [1.0]
        assert run.feedback(t.trajectory_uid, t.prompt_uid, -1.0, source="thumbs", note="it broke later") == "counted"
    ray.get(ray.get_actor("data_pool", namespace).__ray_call__.remote(lambda shard: shard.actor._archive.flush()))
    (file,) = (tmp_path / "archive" / "_rewards").iterdir()
    (row,) = pq.read_table(file).to_pylist()
    assert (row["trajectory_uid"], row["value"], row["source"], row["notes"], row["revision"]) == (
        *(t.trajectory_uid, -1.0),
        *("thumbs", "it broke later", 2),
    )
