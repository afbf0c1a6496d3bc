"""What environments and agents produced reaches an Atropos trainer with the frequencies and advantages that it has."""

import math
import random
from typing import Any

import httpx
import numpy as np
import pytest

from rig.atropos.server import TRAINER, scored_group, serve_atropos
from rig.builders import make_step
from rig.local_pool import LocalPool
from stepwell.pool.api.producing import Registration
from stepwell.wire.scored_groups_arrow import MEDIA_TYPE, groups_from_arrow

RIGHT, WRONG = 1, 2
LIKELY = 0.7
"""The probability of the right answer."""
TRUE = 1 / math.sqrt(2)


def group_of_short_answers(random_answers: random.Random) -> dict[str, Any]:
    """Four answers of one token to the same question: there are only five different scores."""
    answers = [RIGHT if random_answers.random() < LIKELY else WRONG for _ in range(4)]
    logprobs = {RIGHT: math.log(LIKELY), WRONG: math.log(1 - LIKELY)}
    return {
        "tokens": [[100, answer] for answer in answers],
        "masks": [[-100, answer] for answer in answers],
        "scores": [float(answer == RIGHT) for answer in answers],
        "inference_logprobs": [[1.0, logprobs[answer]] for answer in answers],
    }


async def batch_of(url: str, size: int) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await client.post("/register", json={**TRAINER, "batch_size": size})
        batch: list[dict[str, Any]] = (await client.get("/batch")).json()["batch"]
        return batch


async def test_equal_groups_are_all_kept() -> None:
    randoms = random.Random(1)
    groups = [group_of_short_answers(randoms) for _ in range(300)]
    pool = LocalPool()
    async with serve_atropos(pool) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for group in groups[:10]:
                assert (await client.post("/scored_data", json=group)).json() == {"status": "received"}
            answer = await client.post("/scored_data_list", json=groups[10:])
            assert answer.json() == {"status": "received", "groups_processed": 290}
        batch = await batch_of(url, 1_200)
    assert len(batch) == 300
    sent, got = (np.mean([group["scores"] for group in these]) for these in (groups, batch))
    assert got == sent


def record(pool: LocalPool, uid: str, rows: int, reward: float, prompt: str = "p", **changes: Any) -> None:
    """A rollout that is so many rows, because no prompt extends another."""
    pool.rules.register(Registration(uid, prompt, group_size=2))
    pool.rules.submit(
        [
            make_step(uid, prompt, uid=f"{uid}-{row}", started_at=float(row), prompt_ids=[7 * row + 1], **changes)
            for row in range(rows)
        ]
    )
    pool.rules.complete(uid, prompt, reward)


def as_their_trainer_computes(scores: list[float]) -> list[float]:
    """The example trainer of atroposlib reads no `advantages`."""
    centred = np.array(scores) - np.mean(scores)
    return [float(value) for value in centred / max(np.std(scores), 1e-8)]


def trained(item: dict[str, Any]) -> list[set[float]]:
    """For each sequence, the advantages of its trained tokens; those of all others are 0."""
    found = []
    for advantages, mask in zip(item["advantages"], item["masks"], strict=True):
        assert {a for a, m in zip(advantages, mask, strict=True) if m == -100} <= {0.0}
        found.append({round(a, 3) for a, m in zip(advantages, mask, strict=True) if m != -100})
    return found


async def test_a_rollout_of_several_rows_counts_once_in_the_advantages_of_its_group() -> None:
    pool = LocalPool()
    record(pool, "good", 1, 1.0)
    record(pool, "bad", 4, 0.0)
    async with serve_atropos(pool) as url:
        (item,) = await batch_of(url, 2)
    assert item["scores"] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert as_their_trainer_computes(item["scores"]) == pytest.approx([2.0, -0.5, -0.5, -0.5, -0.5])
    assert trained(item) == [{round(TRUE, 3)}, *[{round(-TRUE, 3)}] * 4]


async def test_they_are_in_arrow_too() -> None:
    pool = LocalPool()
    record(pool, "good", 1, 1.0)
    record(pool, "bad", 4, 0.0)
    async with serve_atropos(pool) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        await client.post("/register", json={**TRAINER, "batch_size": 2})
        body = (await client.get("/batch", headers={"accept": MEDIA_TYPE})).content
    (group,) = groups_from_arrow(body)
    own: Any = [extras["advantages"] for extras in group.extras_N]
    assert [row[-1] for row in own] == pytest.approx([TRUE, *[-TRUE] * 4], abs=1e-3)


async def test_a_rollout_that_is_left_out_counts_in_the_advantages_of_the_other() -> None:
    pool = LocalPool()
    for prompt in "pq":
        record(pool, f"good of {prompt}", 1, 1.0, prompt)
        record(pool, f"bad of {prompt}", 1, 0.0, prompt, untrainable="greedy: temperature 0")
    async with serve_atropos(pool) as url:
        batch = await batch_of(url, 2)
    assert [(item["scores"], trained(item)) for item in batch] == [([1.0], [{round(TRUE, 3)}])] * 2


async def test_groups_of_one_row_for_each_rollout_are_as_before() -> None:
    pool = LocalPool()
    record(pool, "good", 1, 1.0)
    record(pool, "bad", 1, 0.0)
    async with serve_atropos(pool) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await client.post("/scored_data", json=scored_group(3, advantages=[[0.0, 0.0, 0.5, 0.5]] * 2))
        batch = await batch_of(url, 4)
    assert [item["advantages"] for item in batch] == [None, [[0.0, 0.0, 0.5, 0.5]] * 2]
