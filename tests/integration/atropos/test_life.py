"""The protocol of Atropos, call by call, as its environments and trainers use it."""

import asyncio
from typing import Any

import httpx
import pytest

from rig.atropos.server import (
    ENVIRONMENT,
    TRAINER,
    firsts,
    join,
    scored_group,
    serve_atropos,
    start_training,
    status_of,
)
from rig.local_pool import LocalPool
from stepwell.pool.api.plan import Overflow


async def test_before_anyone_registers_every_question_has_an_answer(client: httpx.AsyncClient) -> None:
    assert (await client.get("/")).json() == {"message": "Stepwell Atropos server", "arrow": True}
    assert (await client.get("/wandb_info")).json() == {"group": None, "project": None}
    assert (await client.get("/info")).json() == {"batch_size": -1, "max_token_len": -1}
    assert (await client.get("/status")).json() == {"current_step": 0, "queue_size": 0}
    assert (await client.get("/latest_example")).json()["tokens"] == []
    batch = (await client.get("/batch")).json()
    assert (batch["status"], batch["batch"]) == ("error", [])
    assert "POST /register first" in batch["message"]
    assert (await client.post("/disconnect-env", json={"env_id": 0})).json()["status"] == "failure"
    answer = await client.request("GET", "/status-env", json={"env_id": 0})
    assert answer.status_code == 404
    assert "POST /register-env first" in answer.json()["detail"]


async def test_an_environment_waits_for_the_trainers_first_batch(client: httpx.AsyncClient) -> None:
    wait = {"status": "wait for trainer to start"}
    assert (await client.post("/register-env", json=ENVIRONMENT)).json() == wait
    uuid = (await client.post("/register", json={**TRAINER, "starting_step": 7})).json()["uuid"]
    assert isinstance(uuid, int)
    assert (await client.post("/register-env", json=ENVIRONMENT)).json() == wait
    assert (await client.get("/batch")).json() == {"batch": None}
    assert (await client.post("/register-env", json=ENVIRONMENT)).json() == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "sums_0",
        "checkpoint_dir": "checkpoints",
        "starting_step": 7,
        "checkpoint_interval": 10,
        "num_steps": 100,
    }
    assert (await client.post("/register-env", json=ENVIRONMENT)).json()["wandb_name"] == "sums_1"
    assert (await client.get("/wandb_info")).json() == {"group": "group", "project": "project"}
    assert (await client.get("/info")).json() == {"batch_size": 4, "max_token_len": 64}


async def test_groups_come_out_oldest_first_in_batches_of_exactly_the_wanted_size(client: httpx.AsyncClient) -> None:
    await start_training(client)
    env_id = await join(client)
    for first in range(5):
        answer = await client.post("/scored_data", json=scored_group(first, env_id=env_id))
        assert answer.json() == {"status": "received"}
    assert (await client.get("/status")).json() == {"current_step": 0, "queue_size": 5}
    for step, groups in enumerate(([0, 1], [2, 3]), start=1):
        batch = (await client.get("/batch")).json()["batch"]
        assert firsts(batch) == groups
        assert {item["env_id"] for item in batch} == {env_id}
        assert (await client.get("/status")).json() == {"current_step": step, "queue_size": 5 - 2 * step}
    assert (await client.get("/batch")).json() == {"batch": None}
    assert (await client.get("/status")).json() == {"current_step": 2, "queue_size": 1}


async def test_groups_of_any_size_are_taken_and_batches_filled_from_them_exactly(client: httpx.AsyncClient) -> None:
    await start_training(client)
    env_id = await join(client)
    sizes = [3, 2, 2, 1, 4]
    for first, size in enumerate(sizes):
        answer = await client.post("/scored_data", json=scored_group(first, size, env_id=env_id))
        assert answer.json() == {"status": "received"}
    batches = [firsts((await client.get("/batch")).json()["batch"]) for _ in range(3)]
    assert batches == [[0, 3], [1, 2], [4]]


async def test_a_group_that_never_fits_a_batch_is_refused_with_the_reason(client: httpx.AsyncClient) -> None:
    await start_training(client)
    answer = await client.post("/scored_data", json=scored_group(size=5))
    assert answer.status_code == 422
    assert "a group of 5 sequences never fits a batch of 4" in answer.json()["detail"]


async def test_data_may_come_before_the_trainer(client: httpx.AsyncClient) -> None:
    for first in range(2):
        assert (await client.post("/scored_data", json=scored_group(first))).json() == {"status": "received"}
    await client.post("/register", json=TRAINER)
    assert firsts((await client.get("/batch")).json()["batch"]) == [0, 1]


async def test_a_list_of_groups_is_taken_at_once(client: httpx.AsyncClient, pool: LocalPool) -> None:
    groups = [scored_group(first) for first in range(3)]
    answer = await client.post("/scored_data_list", json=groups)
    assert answer.json() == {"status": "received", "groups_processed": 3}
    assert pool.transport.messages == [6]
    assert (await client.post("/scored_data_list", json=[])).json() == {"status": "received", "groups_processed": 0}
    assert (await client.get("/latest_example")).json()["tokens"] == groups[-1]["tokens"]


async def test_groups_that_come_together_travel_together(client: httpx.AsyncClient, pool: LocalPool) -> None:
    posts = (client.post("/scored_data", json=scored_group(first)) for first in range(20))
    assert {answer.json()["status"] for answer in await asyncio.gather(*posts)} == {"received"}
    assert sum(pool.transport.messages) == 40
    assert len(pool.transport.messages) < 20


async def test_an_environment_sees_its_share_of_the_queue_and_its_weight(client: httpx.AsyncClient) -> None:
    await start_training(client, batch_size=8)
    sums = await join(client, weight=3.0)
    games = await join(client, desired_name="games", group_size=4, min_batch_allocation=0.5)
    for first in range(3):
        await client.post("/scored_data", json=scored_group(first, 2, env_id=sums))
    for first in range(3, 6):
        await client.post("/scored_data", json=scored_group(first, 4, env_id=games))
    assert await status_of(client, sums) == {
        "current_step": 0,
        "queue_size": (3 * 2 + 3 * 4 - 4) // 2,
        "unallocated_fraction": 0.5,
        "self_queue_size": 3,
        "max_group_size": 4,
        "env_weight": 0.75,
    }
    of_games = await status_of(client, games)
    assert (of_games["queue_size"], of_games["self_queue_size"]) == ((3 * 4 + 8) // 4, 3)
    assert of_games["env_weight"] == 0.25


@pytest.mark.parametrize("weight", [-1.0, 0.0])
async def test_a_sole_environment_without_weight_gets_the_least(client: httpx.AsyncClient, weight: float) -> None:
    await start_training(client)
    assert (await status_of(client, await join(client, weight=weight)))["env_weight"] == 0.01


async def test_minimums_are_kept_and_one_with_nothing_to_give_holds_up_no_one(client: httpx.AsyncClient) -> None:
    await start_training(client)
    plenty, rare = await join(client), await join(client, desired_name="rare", min_batch_allocation=0.5)
    await join(client, desired_name="silent", min_batch_allocation=0.5)
    for first in range(4):
        await client.post("/scored_data", json=scored_group(first, env_id=plenty))
    await client.post("/scored_data", json=scored_group(9, env_id=rare))
    assert sorted(firsts((await client.get("/batch")).json()["batch"])) == [0, 9]
    assert firsts((await client.get("/batch")).json()["batch"]) == [1, 2]


async def test_an_environment_that_says_goodbye_counts_no_longer(client: httpx.AsyncClient) -> None:
    await start_training(client)
    stays, leaves = await join(client), await join(client, min_batch_allocation=0.5)
    assert (await status_of(client, stays))["env_weight"] == 0.5
    assert (await client.post("/disconnect-env", json={"env_id": leaves})).json() == {"status": "success"}
    status = await status_of(client, stays)
    assert (status["env_weight"], status["unallocated_fraction"]) == (1.0, 1.0)


async def test_registering_again_changes_nothing_and_other_values_begin_anew(client: httpx.AsyncClient) -> None:
    await start_training(client, starting_step=5)
    await client.post("/scored_data_list", json=[scored_group(first) for first in range(2)])
    await client.get("/batch")
    first = (await client.post("/register", json={**TRAINER, "starting_step": 5})).json()["uuid"]
    assert (await client.get("/status")).json()["current_step"] == 6
    assert (await client.post("/register", json={**TRAINER, "starting_step": 2})).json()["uuid"] != first
    assert (await client.get("/status")).json()["current_step"] == 2


async def test_channels_have_trainers_environments_and_data_of_their_own(
    client: httpx.AsyncClient, pool: LocalPool
) -> None:
    other = httpx.AsyncClient(base_url=f"{client.base_url}/channel/judge")
    async with other:
        await start_training(client)
        assert (await other.get("/info")).json()["batch_size"] == -1
        await start_training(other, batch_size=2)
        assert await join(other, desired_name="essays") == 0
        assert (await other.post("/scored_data", json=scored_group(3, env_id=0))).json() == {"status": "received"}
        assert (await client.get("/batch")).json() == {"batch": None}
        assert firsts((await other.get("/batch")).json()["batch"]) == [3]
        assert (await client.get("/status")).json()["current_step"] == 0
        assert (await other.get("/status")).json()["current_step"] == 1
    assert set(pool.rules.state.channels) == {"judge"}


async def test_reset_takes_everything_away_from_its_channel_alone(client: httpx.AsyncClient) -> None:
    await start_training(client)
    await client.post("/channel/judge/scored_data", json=scored_group(1))
    await client.post("/scored_data", json=scored_group(1))
    answer = await client.get("/reset_data")
    assert (answer.text, answer.headers["content-type"]) == ("Reset successful", "text/plain; charset=utf-8")
    assert (await client.get("/status")).json() == {"current_step": 0, "queue_size": 0}
    assert (await client.get("/info")).json()["batch_size"] == -1
    assert (await client.get("/latest_example")).json()["tokens"] == []
    assert (await client.get("/channel/judge/status")).json()["queue_size"] == 1
    assert (await client.post("/scored_data", json=scored_group(1))).json() == {"status": "received"}


async def test_a_group_carries_the_policy_version_of_its_arrival_unless_it_tells_its_own(
    client: httpx.AsyncClient, pool: LocalPool
) -> None:
    await pool.set_policy_version(6)
    await start_training(client)
    await client.post("/scored_data", json=scored_group(0))
    await client.post("/scored_data", json=scored_group(1, policy_versions=[3, None]))
    batch = (await client.get("/batch")).json()["batch"]
    assert [item["policy_versions"] for item in batch] == [[6, 6], [3, 6]]


async def test_metrics_count_groups_batches_and_environments(client: httpx.AsyncClient) -> None:
    await start_training(client)
    await join(client)
    for first in (0, 0, 1):
        await client.post("/scored_data", json=scored_group(first), headers={"Idempotency-Key": f"{first}"})
    await client.get("/batch")
    shown = (await client.get("/metrics")).text
    for line in (
        'stepwell_door_groups_total{result="received"} 2.0',
        'stepwell_door_groups_total{result="duplicate"} 1.0',
        'stepwell_door_batches_total{result="delivered"} 1.0',
        'stepwell_door_step{channel="train"} 1.0',
        'stepwell_door_environments{channel="train"} 1.0',
    ):
        assert line in shown.splitlines()


async def test_it_is_ready_while_the_pool_is_there(client: httpx.AsyncClient, pool: LocalPool) -> None:
    assert (await client.get("/ready")).json() == {"ready": True, "missing": {}}
    pool.away = True
    answer = await client.get("/ready")
    assert (answer.status_code, answer.json()["missing"]) == (503, {"data_pool": "the pool is away"})
    assert (await client.get("/health")).json() == {"status": "ok"}
    for call in (client.get("/status"), client.post("/scored_data", json=scored_group())):
        refused = await call
        assert (refused.status_code, refused.json()) == (503, {"detail": "the pool is away"})


async def test_a_full_pool_is_a_503_for_then_environments_try_again() -> None:
    pool = LocalPool(max_queue_size=1, overflow=Overflow.REFUSE)
    async with serve_atropos(pool) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.post("/scored_data", json=scored_group(0))).status_code == 200
        refused = await client.post("/scored_data", json=scored_group(1))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        await client.post("/register", json={**TRAINER, "batch_size": 2})
        await client.get("/batch")
        assert (await client.post("/scored_data", json=scored_group(1))).json() == {"status": "received"}


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/register", {**TRAINER, "batch_size": 0}, "batch_size must be at least 1"),
        ("/register", {}, "wandb_group is missing"),
        ("/register-env", {**ENVIRONMENT, "min_batch_allocation": 2}, "min_batch_allocation"),
        ("/register-env", {**ENVIRONMENT, "group_size": 0}, "group_size"),
        ("/disconnect-env", {"env_id": "x"}, "env_id"),
        ("/scored_data", {"tokens": [[1]]}, "masks"),
        ("/batch/ack", {"lease": "no"}, "'no' is not a lease"),
    ],
)
async def test_a_wrong_body_is_answered_with_what_is_wrong(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], why: str
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 422
    assert why in answer.json()["detail"]


async def test_paths_and_methods_that_are_not_there_are_not_found(client: httpx.AsyncClient) -> None:
    calls = (("GET", "/nothing"), ("POST", "/batch"), ("GET", "/channel/a"), ("GET", "/channel/a%2Fb/info"))
    for method, path in calls:
        assert (await client.request(method, path)).status_code == 404
