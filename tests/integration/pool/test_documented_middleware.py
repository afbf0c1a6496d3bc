"""What Claw-R1's document on its middleware promises of steps and the pool, with the values that it shows."""

import asyncio
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import pytest

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from stepwell.pool.api.producing import Registration
from stepwell.steps.step import Step


@dataclass
class DocumentedStep:
    """The nine fields of the document's Step, with its types."""

    prompt_ids: list[int]
    response_ids: list[int]
    reward: float
    trajectory_uid: str
    prompt_uid: str
    step_index: int
    policy_version: int
    is_last: bool
    metadata: dict[str, Any]


STEP = DocumentedStep([1, 2, 3], [4, 5], 0.3, "t", "p", 0, 2, True, {"data_source": "gsm8k"})
PROCESS_REWARDS = (0.3, 0.7, 0.9, 0.8)
"""Of one trajectory's four steps, as the document shows them."""


def steps_of(uid: str, prompt: str, rewards: tuple[float, ...] = (1.0,), *, is_whole: bool = True) -> list[Step]:
    last = len(rewards) - 1 if is_whole else None
    return [
        Step(
            prompt_ids=[1] * (i + 1),  # type: ignore[arg-type]  # lists are documented
            response_ids=[5],  # type: ignore[arg-type]
            response_logprobs=[-0.5],  # type: ignore[arg-type]
            temperature=1.0,
            reward=reward,
            trajectory_uid=uid,
            prompt_uid=prompt,
            step_index=i,
            is_last=i == last,
        )
        for i, reward in enumerate(rewards)
    ]


async def submit(pool: LocalPool, *uids: str) -> None:
    for uid in uids:
        await pool.submit_steps(steps_of(f"of-{uid}", uid), channel="train", group_size=1)


def is_as_documented(step: Step) -> bool:
    named = {name: getattr(step, name) for name in asdict(STEP)}
    named |= {name: named[name].tolist() for name in ("prompt_ids", "response_ids")}
    return named == asdict(STEP)


async def test_the_documented_step_comes_back_from_the_pool_as_it_was_submitted(
    pool: LocalPool, engine: FakeEngine
) -> None:
    async with serve_gateway(pool, [engine.url]) as url, httpx.AsyncClient(base_url=url) as agent:
        answer = await agent.post("/submit_steps", json={"steps": [asdict(STEP)]})
        assert answer.json() == {"accepted": 1, "refused": {}}
    (step,) = (await pool.fetch_batch(1, timeout=5, untrainable=True)).steps()
    assert is_as_documented(step)


async def test_a_step_of_lists_is_taken_by_the_pool_itself(pool: LocalPool) -> None:
    await pool.submit_steps([Step(**asdict(STEP))], channel="train", group_size=1)
    (step,) = (await pool.fetch_batch(1, timeout=5, untrainable=True)).steps()
    assert is_as_documented(step)


async def test_a_full_pool_drops_its_oldest_groups_and_gives_the_others_first_in_first_out() -> None:
    pool = LocalPool(max_queue_size=3)
    await submit(pool, "q0", "q1", "q2", "q3", "q4")
    batches = [await pool.fetch_batch(1, timeout=5) for _ in range(3)]
    assert [batch.columns.prompt_uids for batch in batches] == [["q2"], ["q3"], ["q4"]]
    assert pool.rules.stats().channels["train"].held.steps == 0


async def test_a_trainer_mixes_the_latest_trajectories_with_trained_ones() -> None:
    pool = LocalPool(history_size=10)
    await submit(pool, "old-0", "old-1")
    await pool.fetch_batch(2, timeout=5)
    await submit(pool, "new-0", "new-1")
    batch = await pool.fetch_batch(4, history=0.5, timeout=5)
    assert batch.columns.prompt_uids[:2] == ["new-0", "new-1"]
    assert set(batch.columns.prompt_uids[2:]) == {"old-0", "old-1"}
    assert batch.from_history_G.tolist() == [False, False, True, True]


async def test_a_reward_for_each_step_stays_with_it_and_the_return_is_their_sum(pool: LocalPool) -> None:
    await pool.submit_steps(steps_of("t", "p", PROCESS_REWARDS), channel="train", group_size=1)
    batch = await pool.fetch_batch(1, timeout=5)
    assert [step.reward for step in batch.steps()] == pytest.approx(PROCESS_REWARDS)
    assert batch.returns_T.tolist() == pytest.approx([2.7])


async def test_a_trainer_takes_steps_before_their_trajectory_has_ended(pool: LocalPool) -> None:
    await pool.submit_steps(steps_of("t", "p", (0.3, 0.7), is_whole=False), channel="train", group_size=1)
    batch = await pool.fetch_batch(2, unit="steps", timeout=5)
    assert [(step.step_index, step.is_last) for step in batch.steps()] == [(0, False), (1, False)]
    assert [step.reward for step in batch.steps()] == pytest.approx((0.3, 0.7))


async def test_writing_waits_for_no_reader_and_reading_for_no_writer(pool: LocalPool) -> None:
    """A trainer that waits for data holds up no agent, and takes what is there as soon as it is."""
    fetching = asyncio.create_task(pool.fetch_batch(1, timeout=30))
    await pool.register_trajectory(Registration("unfinished", "other"))
    await submit(pool, "p")
    assert (await fetching).columns.prompt_uids == ["p"]
