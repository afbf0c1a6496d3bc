"""The next batch as the dashboard tells it, over the real pool: what a trainer then fetches."""

from typing import Any

import httpx
import pytest

from rig.builders import make_step
from rig.chatml import render_chat
from rig.dashboard import serve_dashboard
from rig.local_pool import LocalPool
from rig.vocabulary import encode
from stepwell.pool.api.producing import Registration
from stepwell.steps.columns import unpack
from tests.integration.dashboard.client import get

START = 1_790_000_000.0


async def rollout(pool: LocalPool, uid: str, prompt: str, *, reward: float | None = 1.0, version: int = 5) -> None:
    await pool.register_trajectory(Registration(uid, prompt, group_size=2))
    asked = render_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"What is {prompt}?"}])
    step = make_step(uid, prompt, uid=f"{uid}-0", prompt_ids=encode(asked), policy_version=version)
    await pool.submit_steps([step])
    if reward is not None:
        await pool.complete_trajectory(uid, prompt, reward)


async def fill(pool: LocalPool) -> None:
    """Groups of two: an old one, two good ones, one that still runs, and one more."""
    pool.advance_to(START)
    await pool.set_policy_version(5, check=False)
    for number, (prompt, version) in enumerate((("old", 1), ("a", 5), ("b", 4), ("running", 5), ("late", 5))):
        pool.advance_to(START + number)
        await rollout(pool, f"0-{prompt}", prompt, version=version)
        await rollout(pool, f"1-{prompt}", prompt, reward=None if prompt == "running" else 0.0, version=version)


async def seen(client: httpx.AsyncClient) -> Any:
    return await get(client, "preview", channel="train")


@pytest.mark.parametrize("shards", [1, 3])
async def test_it_is_the_batch_that_the_trainer_then_gets_and_looking_takes_nothing(shards: int) -> None:
    pool = LocalPool(shards=shards, max_staleness=2)
    await fill(pool)
    async with serve_dashboard(pool) as url, httpx.AsyncClient(base_url=url) as client:
        before = await pool.stats()
        unasked = await seen(client)
        assert unasked["asked_at"] == 0.0
        assert await pool.stats() == before
    assert [group["prompt_uid"] for group in unasked["batch"]] == ["a", "b", "late"]
    assert "8 ready groups in channel 'train'" in unasked["waits_for"]

    batch = await pool.fetch_batch(1, timeout=5, lease=60)
    await pool.nack(batch)  # "a" is the oldest again
    async with serve_dashboard(pool) as url, httpx.AsyncClient(base_url=url) as client:
        next_one = await seen(client)
    assert (next_one["request"]["count"], next_one["is_complete"]) == (1, True)
    fetched = await pool.fetch_batch(1, timeout=5)
    assert [group["prompt_uid"] for group in next_one["batch"]] == [fetched.steps()[0].prompt_uid] == ["a"]


async def test_a_row_has_what_a_person_decides_by_and_what_waits_says_why() -> None:
    pool = LocalPool(max_staleness=2)
    await fill(pool)
    request = await pool.fetch_batch(2, timeout=5, lease=60)
    await pool.nack(request)
    async with serve_dashboard(pool) as url, httpx.AsyncClient(base_url=url) as client:
        await rollout(pool, "0-alone", "alone")
        next_one = await seen(client)
    first, second = next_one["batch"]
    assert (first["prompt_uid"], first["rollouts"], first["rewards"], first["behind"]) == ("a", 2, [1.0, 0.0], 0)
    assert (second["prompt_uid"], second["steps"], second["oldest_version"], second["behind"]) == ("b", 2, 4, 1)
    assert first["prompt"] == "What is a?"
    assert {group["prompt_uid"]: group["why"] for group in next_one["waiting"]} == {
        "running": "1 of 2 rollouts are complete, 1 running",
        "late": "the batch is full: its turn comes later",
        "alone": "1 of 2 rollouts are complete, 1 not started",
    }
    assert next_one["waits_for"] == ""


async def test_what_a_fetch_will_drop_says_so() -> None:
    pool = LocalPool(max_staleness=2)
    await fill(pool)
    async with serve_dashboard(pool) as url, httpx.AsyncClient(base_url=url) as client:
        (old, running) = (await seen(client))["waiting"]
    assert (old["prompt_uid"], old["why"]) == ("old", "too old (max_staleness 2): the next fetch drops it")
    assert running["prompt_uid"] == "running"


async def test_an_exact_batch_of_an_environment_is_foreseen_too() -> None:
    pool = LocalPool(shards=2)
    await fill(pool)
    terms: Any = {"channel": "train", "shares": {}, "lease": 60}
    filled = await pool.fill_batch(4, **terms)
    assert filled is not None
    await pool.nack(filled)
    async with serve_dashboard(pool) as url, httpx.AsyncClient(base_url=url) as client:
        next_one = await seen(client)
    again = await pool.fill_batch(4, **terms)
    assert again is not None
    prompts = {step.prompt_uid for step in unpack(again.columns, copy=False)}
    assert next_one["request"]["kind"] == "exact"
    assert {group["prompt_uid"] for group in next_one["batch"]} == prompts == {"old", "a"}


async def test_many_viewers_cost_the_pool_as_much_as_one_and_a_channel_must_be_known() -> None:
    pool = LocalPool()
    await fill(pool)
    asked = 0
    preview = pool.preview

    async def counted(channel: str) -> Any:
        nonlocal asked
        asked += 1
        return await preview(channel)

    pool.preview = counted  # type: ignore[method-assign]
    async with serve_dashboard(pool) as url, httpx.AsyncClient(base_url=url) as client:
        for _ in range(30):
            await seen(client)
        answer = await client.get("/api/preview", params={"channel": "unheard"})
    assert asked <= 5
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "there is no channel 'unheard'; the pool has train",
    )
