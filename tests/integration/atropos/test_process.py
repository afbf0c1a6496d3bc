"""The door as its own process, with real Ray: it can be killed, and goes on where it was."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import DataPool, PoolClient
from stepwell.pool.shard.actor import start_pool
from stepwell.wire.scored_groups import group_from_json
from stepwell.wire.scored_groups_arrow import MEDIA_TYPE, groups_from_arrow, groups_to_arrow
from tests.rig.doors import ENVIRONMENT, TRAINER, door_process, firsts, scored_group
from tests.rig.gateways import GatewayProcess, free_port
from tests.rig.ray_cluster import RayCluster

StartDoor = Callable[..., AbstractContextManager[GatewayProcess]]


@pytest.fixture
def data_pool(namespace: str) -> DataPool:
    start_pool(PoolPlan(shards=2), namespace)
    return DataPool(PoolClient("data_pool", namespace))


@pytest.fixture
def start_door(ray_cluster: RayCluster, namespace: str, tmp_path: Path) -> StartDoor:
    def start(**flags: Any) -> AbstractContextManager[GatewayProcess]:
        ray: dict[str, Any] = {"ray_address": ray_cluster.address, "ray_namespace": namespace}
        return door_process(tmp_path / "door.log", **ray, **flags)

    return start


def status_of(url: str, env_id: int) -> dict[str, Any]:
    status: dict[str, Any] = httpx.request("GET", f"{url}/status-env", json={"env_id": env_id}).json()
    return status


def test_from_registering_to_a_batch_over_real_ray(start_door: StartDoor, data_pool: DataPool) -> None:
    with start_door() as door, httpx.Client(base_url=door.url) as client:
        assert client.get("/ready").json() == {"ready": True, "missing": {}}
        client.post("/register", json=TRAINER)
        assert client.get("/batch").json() == {"batch": None}
        env_id = client.post("/register-env", json=ENVIRONMENT).json()["env_id"]
        groups = [scored_group(first, env_id=env_id, messages=[[], []]) for first in range(5)]
        for group in groups[:3]:
            assert client.post("/scored_data", json=group).json() == {"status": "received"}
        body, headers = groups_to_arrow(map(group_from_json, groups[3:])), {"content-type": MEDIA_TYPE}
        assert client.post("/scored_data_list", content=body, headers=headers).json()["groups_processed"] == 2
        assert client.post("/scored_data", json=groups[0]).json() == {"status": "received", "duplicate": True}
        assert status_of(door.url, env_id)["self_queue_size"] == 5
        batch = client.get("/batch").json()["batch"]
        assert firsts(batch) == [0, 1]
        assert [item["messages"] for item in batch] == [[[], []]] * 2
        assert [item["inference_logprobs"] for item in batch] == [group["inference_logprobs"] for group in groups[:2]]
        arrow = client.get("/batch", headers={"accept": MEDIA_TYPE})
        assert [int(group.tokens[0]) for group in groups_from_arrow(arrow.content)] == [2, 3]
        assert client.get("/status").json() == {"current_step": 2, "queue_size": 1}
    (trajectories,) = data_pool.fetch_batch(1, timeout=10).groups()
    assert [steps[0].extras["messages"] for steps in trajectories] == [[], []]


def test_a_door_that_is_killed_goes_on_where_it_was(start_door: StartDoor, data_pool: DataPool, tmp_path: Path) -> None:
    state, port = tmp_path / "door.json", free_port()
    with start_door(state=state, port=port) as door:
        httpx.post(f"{door.url}/register", json={**TRAINER, "starting_step": 3})
        httpx.get(f"{door.url}/batch")
        env = {**ENVIRONMENT, "min_batch_allocation": 0.25}
        names = [httpx.post(f"{door.url}/register-env", json=env).json()["wandb_name"] for _ in range(2)]
        httpx.post(f"{door.url}/disconnect-env", json={"env_id": 1})
        groups = [scored_group(first, env_id=0) for first in range(4)]
        httpx.post(f"{door.url}/scored_data_list", json=groups, headers={"Idempotency-Key": "list"})
        httpx.get(f"{door.url}/batch")
        lease = httpx.get(f"{door.url}/batch?lease=60").headers["x-stepwell-lease"]
        door.kill()
    assert names == ["sums_0", "sums_1"]
    with start_door(state=state, port=port) as door:
        assert httpx.get(f"{door.url}/info").json() == {"batch_size": 4, "max_token_len": 64}
        status = status_of(door.url, 0)
        assert (status["current_step"], status["env_weight"], status["unallocated_fraction"]) == (4, 1.0, 0.75)
        answer = httpx.post(f"{door.url}/scored_data_list", json=groups, headers={"Idempotency-Key": "list"})
        assert answer.json() == {"status": "received", "groups_processed": 4, "duplicates": 4}
        assert httpx.get(f"{door.url}/batch").json() == {"batch": None}
        acknowledged = httpx.post(f"{door.url}/batch/ack", json={"lease": lease})
        assert acknowledged.json() == {"status": "success", "current_step": 5}
        assert httpx.post(f"{door.url}/register-env", json=env).json()["wandb_name"] == "sums_2"
    assert data_pool.stats().channels["train"].accepted.steps == 8


def test_what_is_wrong_with_the_state_file_is_said_in_one_line(
    start_door: StartDoor, data_pool: DataPool, tmp_path: Path
) -> None:
    state = tmp_path / "door.json"
    state.write_text('{"channels": 3}')
    why = "is no state of a door, move it away to begin anew"
    with pytest.raises(AssertionError, match=why), start_door(state=state):
        pass
    assert "Traceback" not in (tmp_path / "door.log").read_text()


def test_without_a_pool_it_says_so_and_waits(start_door: StartDoor, namespace: str) -> None:
    with start_door(data_pool_name="nothing") as door:
        missing = httpx.get(f"{door.url}/ready", timeout=30).json()["missing"]
        assert "stepwell pool --name nothing" in missing["data_pool"]
