"""A batch is delivered or comes back: leases, clients that leave, retries, and what agents recorded."""

import asyncio
import json
from typing import Any

import httpx
import pytest
import zstandard

from rig.atropos.server import TRAINER, firsts, join, scored_group, serve_atropos, start_training, status_of
from rig.builders import make_step
from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.pool.api.producing import Registration
from stepwell.steps.step import Exactness, Step
from stepwell.wire.scored_groups import group_from_json
from stepwell.wire.scored_groups_arrow import MEDIA_TYPE, groups_from_arrow, groups_to_arrow

ARROW = {"accept": MEDIA_TYPE}
BIG = 400_000
"""Tokens a sequence: more than the sockets between two processes hold unread."""


async def fill(client: httpx.AsyncClient, groups: int = 2, **fields: Any) -> None:
    await client.post("/scored_data_list", json=[scored_group(first, **fields) for first in range(groups)])


async def step(client: httpx.AsyncClient) -> int:
    current: int = (await client.get("/status")).json()["current_step"]
    return current


async def test_a_client_that_leaves_in_the_middle_of_its_answer_loses_nothing(
    client: httpx.AsyncClient, pool: LocalPool
) -> None:
    await client.post("/register", json=TRAINER)
    tokens = [[100_000 + n] * BIG for n in range(4)]
    await client.post("/scored_data", json={"tokens": tokens, "masks": tokens, "scores": [0, 1, 2, 3]}, timeout=30)
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(b"GET /batch HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert (await reader.read(1000)).startswith(b"HTTP/1.1 200")
    assert pool.rules.ready_groups("train").total_groups == 0, "it is under lease"
    writer.transport.abort()
    await until(lambda: pool.rules.ready_groups("train").total_groups == 1, "the batch to come back")
    assert await step(client) == 0
    (item,) = (await client.get("/batch", timeout=30)).json()["batch"]
    assert item["tokens"] == tokens
    assert await step(client) == 1


async def test_an_answer_that_the_pool_does_not_confirm_breaks_off_and_is_served_again(
    client: httpx.AsyncClient, pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.post("/register", json=TRAINER)
    await fill(client)
    fill_batch = pool.fill_batch

    async def late(*args: Any, **terms: Any) -> Any:
        filled = await fill_batch(*args, **terms)
        pool.advance_to(10_000)
        return filled

    monkeypatch.setattr(pool, "fill_batch", late)
    with pytest.raises(httpx.RemoteProtocolError):
        await client.get("/batch")
    monkeypatch.undo()
    assert await step(client) == 0
    assert firsts((await client.get("/batch")).json()["batch"]) == [0, 1]


async def test_a_trainer_may_acknowledge_by_itself(client: httpx.AsyncClient, pool: LocalPool) -> None:
    await client.post("/register", json=TRAINER)
    await fill(client, 4)
    leases = [(await client.get("/batch?lease=60")).headers["x-stepwell-lease"] for _ in range(2)]
    assert (await client.get("/batch")).json() == {"batch": None}
    assert await step(client) == 0
    for _ in range(2):  # said again, it counts once
        answer = await client.post("/batch/ack", json={"lease": leases[0]})
        assert answer.json() == {"status": "success", "current_step": 1}
    assert (await client.post("/batch/nack", json={"lease": leases[1]})).json() == {"status": "success"}
    again = await client.get("/batch?lease=60")
    assert firsts(again.json()["batch"]) == [2, 3]
    pool.advance_to(61)
    late = await client.post("/batch/ack", json={"lease": again.headers["x-stepwell-lease"]})
    assert late.status_code == 409
    assert "the lease was over" in late.json()["detail"]
    assert firsts((await client.get("/batch")).json()["batch"]) == [2, 3]
    assert await step(client) == 2


@pytest.mark.parametrize("query", ["lease=0", "lease=-1", "lease=x", "lease=inf", "lease=nan", "min_exactness=sure"])
async def test_terms_that_make_no_sense_are_refused(client: httpx.AsyncClient, query: str) -> None:
    await client.post("/register", json=TRAINER)
    assert (await client.get(f"/batch?{query}")).status_code == 422


async def test_a_group_sent_again_under_its_key_is_taken_once(client: httpx.AsyncClient, pool: LocalPool) -> None:
    async def send(first: int) -> httpx.Response:
        return await client.post("/scored_data", json=scored_group(first), headers={"Idempotency-Key": f"{first}"})

    await client.post("/register", json=TRAINER)
    again = {"status": "received", "duplicate": True}
    for expected in ({"status": "received"}, again, again):
        assert (await send(1)).json() == expected
    pool.transport.loses_answers = 1
    assert (await send(2)).status_code == 503
    assert (await send(2)).json() == again
    assert firsts((await client.get("/batch")).json()["batch"]) == [1, 2]
    assert (await send(2)).json() == again, "it was trained by now"
    groups, list_key = [scored_group(2), scored_group(3)], {"Idempotency-Key": "list"}
    for count in ({}, {"duplicates": 2}):
        answer = await client.post("/scored_data_list", json=groups, headers=list_key)
        assert answer.json() == {"status": "received", "groups_processed": 2, **count}
    assert (await client.get("/status")).json() == {"current_step": 1, "queue_size": 2}


async def test_a_key_tells_repeats_from_equal_groups(client: httpx.AsyncClient) -> None:
    async def post(key: str, first: int = 1) -> dict[str, Any]:
        answer = await client.post("/scored_data", json=scored_group(first), headers={"Idempotency-Key": key})
        told: dict[str, Any] = answer.json()
        return told

    assert await post("a") == {"status": "received"}
    assert await post("b") == {"status": "received"}
    assert await post("a") == {"status": "received", "duplicate": True}
    assert (await client.get("/status")).json()["queue_size"] == 2


async def test_arrow_goes_in_and_comes_out(client: httpx.AsyncClient) -> None:
    await client.post("/register", json=TRAINER)
    sent = [group_from_json(scored_group(first, images={"n": first}, policy_versions=[4, 5])) for first in range(2)]
    sends = {"content": groups_to_arrow(sent), "headers": {"content-type": MEDIA_TYPE}}
    told = {"status": "received", "groups_processed": 2}
    assert (await client.post("/scored_data_list", **sends)).json() == told  # type: ignore[arg-type]
    got = await client.get("/batch", headers=ARROW)
    assert got.headers["content-type"] == MEDIA_TYPE
    assert groups_to_arrow(groups_from_arrow(got.content)) == groups_to_arrow(sent)
    assert groups_from_arrow((await client.get("/batch", headers=ARROW)).content) == []


async def test_arrow_names_its_environment_in_the_group_or_the_url(client: httpx.AsyncClient) -> None:
    await start_training(client)
    one, two = await join(client), await join(client)
    headers = {"content-type": MEDIA_TYPE}
    named = groups_to_arrow([group_from_json(scored_group(1, env_id=one))])
    nameless = groups_to_arrow([group_from_json(scored_group(2))])
    await client.post("/scored_data", content=named, headers=headers)
    await client.post(f"/scored_data?env_id={two}", content=nameless, headers=headers)
    assert [(await status_of(client, env))["self_queue_size"] for env in (one, two)] == [1, 1]
    batch = (await client.get("/batch")).json()["batch"]
    assert [item["env_id"] for item in batch] == [one, two]


async def test_a_row_without_a_score_or_a_stream_without_a_group_is_refused(client: httpx.AsyncClient) -> None:
    headers = {"content-type": MEDIA_TYPE}
    group = group_from_json(scored_group(1))
    group.scores_N.setflags(write=True)
    group.scores_N[0] = float("nan")
    for content in (groups_to_arrow([group]), groups_to_arrow([]), b"no"):
        assert (await client.post("/scored_data", content=content, headers=headers)).status_code == 422


async def test_a_batch_is_compressed_where_the_client_can_read_it(client: httpx.AsyncClient) -> None:
    await client.post("/register", json=TRAINER)
    await fill(client, 6)
    plain = await client.get("/batch", headers={"accept-encoding": "gzip, deflate"})
    assert "content-encoding" not in plain.headers
    async with client.stream("GET", "/batch", headers={"accept-encoding": "gzip, zstd"}) as answer:
        assert answer.headers["content-encoding"] == "zstd"
        raw = b"".join([part async for part in answer.aiter_raw()])
    inflated = zstandard.ZstdDecompressor().decompressobj().decompress(raw)
    assert firsts(json.loads(inflated)["batch"]) == [2, 3]
    assert await step(client) == 2


def agents_step(uid: str, index: int, prompt: list[int], response: list[int], **fields: Any) -> Step:
    fields = {"exactness": Exactness.ENGINE, "policy_version": 3, "prompt_ids": prompt, **fields}
    return make_step(uid, "q", step_index=index, uid=f"{uid}-{index}", response_ids=response, **fields)


async def test_what_agents_recorded_is_served_beside_what_environments_sent(
    client: httpx.AsyncClient, pool: LocalPool
) -> None:
    await client.post("/register", json=TRAINER)
    for uid in ("a", "b"):
        await pool.register_trajectory(Registration(uid, "q", group_size=2))
    await pool.submit_steps(
        [
            agents_step("a", 0, [1], [2]),
            agents_step("a", 1, [1, 2, 3], [4], is_last=True, reward=1.5),
            agents_step("b", 0, [1], [5]),
            agents_step("b", 1, [8], [9], untrainable="side_call: a title", is_last=True),
        ]
    )
    await pool.complete_trajectory("b", "q", -1.0)
    await client.post("/scored_data", json=scored_group(7))
    agents, environments = (await client.get("/batch")).json()["batch"]
    assert agents["tokens"] == [[1, 2, 3, 4], [1, 5]]
    assert agents["masks"] == [[-100, 2, -100, 4], [-100, 5]]
    assert agents["scores"] == [1.5, -1.0]
    assert agents["policy_versions"] == [3, 3]
    assert environments["tokens"][0][0] == 7


async def test_a_trainer_may_ask_for_exact_tokens_only(client: httpx.AsyncClient) -> None:
    await client.post("/register", json={**TRAINER, "batch_size": 2})
    for first, grade in enumerate(("retokenized", "engine")):
        await client.post("/scored_data", json=scored_group(first, exactness=[grade, grade]))
    assert firsts((await client.get("/batch?min_exactness=engine")).json()["batch"]) == [1]


async def test_a_status_is_answered_while_a_large_batch_is_on_its_way(client: httpx.AsyncClient) -> None:
    await client.post("/register", json={**TRAINER, "batch_size": 64})
    tokens = [[n] * 2048 for n in range(8)]
    logprobs = [[-0.5] * 2048] * 8
    for first in range(8):
        body = {"tokens": tokens, "masks": tokens, "scores": [first] * 8, "inference_logprobs": logprobs}
        await client.post("/scored_data", json=body)
    fetching = asyncio.create_task(client.get("/batch", timeout=30))
    asked = 0
    while not fetching.done():
        await client.get("/info")
        asked += 1
    assert len((await fetching).json()["batch"]) == 8
    assert asked > 3


async def test_the_same_server_serves_several_trainers_of_one_channel(pool: LocalPool) -> None:
    async with serve_atropos(pool) as url, httpx.AsyncClient(base_url=url) as client:
        await client.post("/register", json=TRAINER)
        await fill(client, 12)
        got = await asyncio.gather(*(client.get("/batch") for _ in range(8)))
        batches = [answer.json()["batch"] for answer in got]
        assert sorted(first for batch in batches if batch for first in firsts(batch)) == list(range(12))
        assert sum(batch is None for batch in batches) == 2
        assert await step(client) == 6
