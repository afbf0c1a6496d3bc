"""The Atropos server as its own process, with real Ray: it can be killed, and goes on where it was."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from stepwell.pool.actors import start_pool

from rig.atropos.server import ENVIRONMENT, TRAINER, atropos_process, firsts, scored_group
from rig.gateways import GatewayProcess, free_port
from rig.ray_cluster import RayCluster
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import DataPool, PoolClient
from stepwell.wire.scored_groups import group_from_json
from stepwell.wire.scored_groups_arrow import MEDIA_TYPE, groups_from_arrow, groups_to_arrow

StartServer = Callable[..., AbstractContextManager[GatewayProcess]]


@pytest.fixture
def data_pool(namespace: str) -> DataPool:
    start_pool(PoolPlan(shards=2), namespace)
    return DataPool(PoolClient("data_pool", namespace))


@pytest.fixture
def start_server(ray_cluster: RayCluster, namespace: str, tmp_path: Path) -> StartServer:
    def start(**flags: Any) -> AbstractContextManager[GatewayProcess]:
        ray: dict[str, Any] = {"ray_address": ray_cluster.address, "ray_namespace": namespace}
        return atropos_process(tmp_path / "atropos.log", **ray, **flags)

    return start


def status_of(url: str, env_id: int) -> dict[str, Any]:
    status: dict[str, Any] = httpx.request("GET", f"{url}/status-env", json={"env_id": env_id}).json()
    return status


def test_from_registering_to_a_batch_over_real_ray(start_server: StartServer, data_pool: DataPool) -> None:
    with start_server() as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/ready").json() == {"ready": True, "missing": {}}
        client.post("/register", json=TRAINER)
        assert client.get("/batch").json() == {"batch": None}
        env_id = client.post("/register-env", json=ENVIRONMENT).json()["env_id"]
        groups = [scored_group(first, env_id=env_id, messages=[[], []]) for first in range(5)]
        for key, group in enumerate(groups[:3]):
            answer = client.post("/scored_data", json=group, headers={"Idempotency-Key": f"{key}"})
            assert answer.json() == {"status": "received"}
        body, headers = groups_to_arrow(map(group_from_json, groups[3:])), {"content-type": MEDIA_TYPE}
        assert client.post("/scored_data_list", content=body, headers=headers).json()["groups_processed"] == 2
        again = client.post("/scored_data", json=groups[0], headers={"Idempotency-Key": "0"})
        assert again.json() == {"status": "received", "duplicate": True}
        assert status_of(server.url, env_id)["self_queue_size"] == 5
        batch = client.get("/batch").json()["batch"]
        assert firsts(batch) == [0, 1]
        assert [item["messages"] for item in batch] == [[[], []]] * 2
        assert [item["inference_logprobs"] for item in batch] == [group["inference_logprobs"] for group in groups[:2]]
        arrow = client.get("/batch", headers={"accept": MEDIA_TYPE})
        second = [int(group.tokens[0]) for group in groups_from_arrow(arrow.content)]
        assert second in ([2, 3], [2, 4]), "the groups of one list may be on two shards, where they have no order"
        assert client.get("/status").json() == {"current_step": 2, "queue_size": 1}
    (trajectories,) = data_pool.fetch_batch(1, timeout=60).groups()
    assert [steps[0].extras["messages"] for steps in trajectories] == [[], []]


def test_a_killed_server_goes_on_where_it_was(start_server: StartServer, data_pool: DataPool, tmp_path: Path) -> None:
    state, port = tmp_path / "atropos.json", free_port()
    with start_server(state=state, port=port) as server:
        httpx.post(f"{server.url}/register", json={**TRAINER, "starting_step": 3})
        httpx.get(f"{server.url}/batch")
        env = {**ENVIRONMENT, "min_batch_allocation": 0.25}
        names = [httpx.post(f"{server.url}/register-env", json=env).json()["wandb_name"] for _ in range(2)]
        httpx.post(f"{server.url}/disconnect-env", json={"env_id": 1})
        groups = [scored_group(first, env_id=0) for first in range(4)]
        httpx.post(f"{server.url}/scored_data_list", json=groups, headers={"Idempotency-Key": "list"})
        httpx.get(f"{server.url}/batch")
        lease = httpx.get(f"{server.url}/batch?lease=60").headers["x-stepwell-lease"]
        server.kill()
    assert names == ["sums_0", "sums_1"]
    with start_server(state=state, port=port) as server:
        assert httpx.get(f"{server.url}/info").json() == {"batch_size": 4, "max_token_len": 64}
        status = status_of(server.url, 0)
        assert (status["current_step"], status["env_weight"], status["unallocated_fraction"]) == (4, 1.0, 0.75)
        answer = httpx.post(f"{server.url}/scored_data_list", json=groups, headers={"Idempotency-Key": "list"})
        assert answer.json() == {"status": "received", "groups_processed": 4, "duplicates": 4}
        assert httpx.get(f"{server.url}/batch").json() == {"batch": None}
        acknowledged = httpx.post(f"{server.url}/batch/ack", json={"lease": lease})
        assert acknowledged.json() == {"status": "success", "current_step": 5}
        assert httpx.post(f"{server.url}/register-env", json=env).json()["wandb_name"] == "sums_2"
    assert data_pool.stats().channels["train"].accepted.steps == 8


def test_what_is_wrong_with_the_state_file_is_said_in_one_line(
    start_server: StartServer, data_pool: DataPool, tmp_path: Path
) -> None:
    state = tmp_path / "atropos.json"
    state.write_text('{"channels": 3}')
    why = "is not a state file of stepwell atropos; move it away to start anew"
    with pytest.raises(AssertionError, match=why), start_server(state=state):
        pass
    assert "Traceback" not in (tmp_path / "atropos.log").read_text()


def test_without_a_pool_it_says_so_and_waits(start_server: StartServer, namespace: str) -> None:
    with start_server(data_pool_name="nothing") as server:
        missing = httpx.get(f"{server.url}/ready", timeout=120).json()["missing"]
        assert "stepwell pool --name nothing" in missing["data_pool"]
