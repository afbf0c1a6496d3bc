"""The gateway as its own process, with real Ray: how it starts, what it says, and that it can be killed."""

import http.client
import os
import select
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import ray

import stepwell
from rig.fake_engine import FakeEngine
from rig.gateways import free_port
from rig.ray_cluster import RayCluster
from rig.waiting import wait_until
from stepwell.pool.api.scoring import RewardRequest, RewardScore
from stepwell.pool.client import DataPool
from tests.integration.gateway.conftest import StartGateway

HOLD_TOKENIZERS = """
import importlib.util, os, sys, time

class Hold:
    def find_spec(self, name, path=None, target=None):
        if name != "tokenizers":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_when_told(module):
            while not os.path.exists(os.environ["GO_ON"]):
                time.sleep(0.02)
            load(module)

        spec.loader.exec_module = load_when_told
        return spec

sys.meta_path.insert(0, Hold())
"""
"""A slow disk: the library that reads the tokenizer loads only once a file appears."""


get, post = partial(httpx.get, timeout=120.0), partial(httpx.post, timeout=120.0)
"""A busy machine takes its time, which is not what these tests are about."""


def say(base_url: str, text: str = "hello") -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return post(f"{base_url}/v1/chat/completions", json=body)


def is_ready(url: str) -> bool:
    return get(f"{url}/ready").status_code == httpx.codes.OK


def test_it_serves_while_the_tokenizer_loads_and_ready_names_what_is_missing(
    start_gateway: StartGateway, data_pool: DataPool, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOLD_TOKENIZERS)
    go_on = tmp_path / "go_on"
    env = {"PYTHONPATH": str(tmp_path), "GO_ON": str(go_on)}
    with start_gateway(env=env) as gateway:
        assert get(f"{gateway.url}/health").json() == {"status": "ok"}
        wait_until(lambda: "data_pool" not in get(f"{gateway.url}/ready").json()["missing"], "the pool to answer")
        answer = get(f"{gateway.url}/ready")
        assert answer.status_code == 503
        assert answer.json()["ready"] is False
        assert list(answer.json()["missing"]) == ["tokenizer"]
        assert "still loading" in answer.json()["missing"]["tokenizer"]
        with stepwell.Run(gateway.url).trajectory() as t:
            assert say(t.base_url).status_code == 200
        assert len(data_pool.fetch_batch(1, timeout=60)) == 1
        go_on.touch()
        wait_until(lambda: is_ready(gateway.url), "the gateway to be ready")
        assert get(f"{gateway.url}/ready").json() == {"ready": True, "missing": {}}


def test_a_missing_pool_engine_tokenizer_or_reward_worker_gives_one_clear_line_each(
    start_gateway: StartGateway, namespace: str
) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    with start_gateway(
        data_pool_name="nothing", vllm_addresses=nowhere, tokenizer_path="./none", reward_worker_name="nobody"
    ) as gateway:
        wait_until(lambda: "loaded from" in gateway.log.read_text(), "the tokenizer to fail")
        missing = get(f"{gateway.url}/ready").json()["missing"]
        lines = [line for line in gateway.log.read_text().splitlines() if "waiting for" in line]
    assert missing["data_pool"] == (
        f"no DataPool named 'nothing' in Ray namespace '{namespace}'; create it with: "
        f"stepwell pool --name nothing --ray-namespace {namespace}"
    )
    assert nowhere in missing["engines"]
    assert missing["tokenizer"].startswith("no tokenizer could be loaded from ./none: ")
    assert missing["reward_worker"] == f"no reward worker named 'nobody' in Ray namespace '{namespace}'"
    for part, why in missing.items():
        assert sum(f"waiting for {part}: {why}" in line for line in lines) == 1


def gateway_output(**changes: str) -> tuple[int, str]:
    flags = {"data-pool-name": "p", "vllm-addresses": "http://127.0.0.1:1", "tokenizer-path": "t"}
    flags |= {"prompt-length": "1", "response-length": "1", "host": "127.0.0.1", "port": "0"}
    env = dict(os.environ)
    for name, value in changes.items():
        (env if name.isupper() else flags)[name.replace("_", "-") if name.islower() else name] = value
    command = [sys.executable, "-m", "stepwell.gateway", *(x for k, v in flags.items() for x in (f"--{k}", v))]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=180, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_wrong_ray_token_gives_one_clear_line(ray_cluster: RayCluster) -> None:
    status, output = gateway_output(ray_address=ray_cluster.address, RAY_AUTH_TOKEN="0" * 64)
    assert status == 1
    assert output == (
        f"python -m stepwell.gateway: Ray at {ray_cluster.address} did not let this process in: its token is missing "
        "or wrong. Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the token the cluster was "
        "started with\n"
    )


def test_a_gateway_starts_without_ray_and_says_what_is_missing(start_gateway: StartGateway) -> None:
    address = f"127.0.0.1:{free_port()}"
    with start_gateway(ray_address=address) as gateway:
        why = get(f"{gateway.url}/ready").json()["missing"]["data_pool"]
    assert f"no Ray cluster listens at {address}; start one with: ray start --head" in why
    assert f"Ray is away: no Ray cluster listens at {address}" in gateway.log.read_text()


def test_a_connection_is_not_closed_while_an_agent_works_on_its_tools_for_some_seconds(
    start_gateway: StartGateway,
) -> None:
    with start_gateway(ray_address=f"127.0.0.1:{free_port()}") as gateway:
        url = httpx.URL(gateway.url)
        with closing(http.client.HTTPConnection(url.host, url.port, timeout=10)) as agent:
            agent.request("GET", "/health")
            agent.getresponse().read()
            opened = agent.sock
            readable, _, _ = select.select([opened], [], [], 6.0)
            assert not readable, "the gateway closed the connection"
            agent.request("GET", "/health")
            assert agent.getresponse().status == 200
            assert agent.sock is opened


def test_a_gateway_does_not_load_ray_into_its_own_process(start_gateway: StartGateway, data_pool: DataPool) -> None:
    with start_gateway() as gateway:
        wait_until(lambda: is_ready(gateway.url), "the gateway to be ready")
        maps = Path(f"/proc/{gateway.process.pid}/maps").read_text()
    assert "_raylet.so" not in maps


def test_wrong_flags_give_one_clear_line_each() -> None:
    status, output = gateway_output(vllm_addresses="host:8001", prompt_length="0")
    assert status == 2
    assert output.splitlines() == [
        "python -m stepwell.gateway: --vllm-addresses: 'host:8001' is not an address; write "
        "http://host:port,http://host:port",
        "python -m stepwell.gateway: --prompt-length must be at least 1",
    ]


def test_the_command_redacts_with_the_named_function_and_refuses_one_that_is_not_there(
    start_gateway: StartGateway, data_pool: DataPool, ray_cluster: RayCluster
) -> None:
    examples = "stepwell.gateway.recording.redaction_examples"
    with start_gateway(redact=f"{examples}:everything") as gateway:
        wait_until(lambda: is_ready(gateway.url), "the gateway to be ready")
        base_url = post(f"{gateway.url}/init_trajectory", json={}).json()["base_url"]
        assert say(base_url, "I am bob@example.org").status_code == 200
        assert post(f"{base_url}/v1/complete_trajectory", json={"reward": 1.0}).json() == {"status": "completed"}
    (((step,),),) = data_pool.fetch_batch(1, untrainable=True, timeout=60).groups()
    assert b"I am " + b"*" * len("bob@example.org") in bytes(token for token in step.prompt_ids.tolist() if token < 256)
    status, output = gateway_output(redact=f"{examples}:nothing", ray_address=ray_cluster.address)
    assert status != 0
    assert f"{examples} has no 'nothing'; its functions are: everything, keys, mail_addresses" in output


def test_a_gateway_killed_in_mid_trajectory_and_started_again_goes_on_where_it_was(
    start_gateway: StartGateway, data_pool: DataPool
) -> None:
    port = free_port()
    with start_gateway(port=port) as gateway:
        body = {"channel": "validation", "metadata": {"task": 7}}
        base_url = post(f"{gateway.url}/init_trajectory", json=body).json()["base_url"]
        for turn in ("first", "second"):
            assert say(base_url, turn).status_code == 200
        wait_until(lambda: data_pool.stats().channels["validation"].accepted.steps == 2, "two steps in the pool")
        gateway.kill()
    with start_gateway(port=port):
        assert say(base_url, "third").status_code == 200
        assert post(f"{base_url}/v1/complete_trajectory", json={"reward": 1.0}).json() == {"status": "completed"}
    ((trajectory,),) = data_pool.fetch_batch(1, channel="validation", timeout=60).groups()
    assert [(step.step_index, step.is_last) for step in trajectory] == [(0, False), (1, False), (2, True)]
    assert all(step.metadata == {"task": 7} for step in trajectory)
    assert "train" not in data_pool.stats().channels


def test_two_gateways_serving_one_trajectory_by_turns_leave_no_gap_and_no_repeat(
    start_gateway: StartGateway, data_pool: DataPool, engine_thread: FakeEngine
) -> None:
    with start_gateway() as one, start_gateway() as other:
        base_url = post(f"{one.url}/init_trajectory", json={}).json()["base_url"]
        elsewhere = base_url.replace(one.url, other.url)
        for turn in range(20):
            assert say((base_url, elsewhere)[turn % 2], "x" * turn).status_code == 200
        wait_until(lambda: data_pool.stats().channels["train"].accepted.steps == 20, "all steps in the pool")
        assert post(f"{elsewhere}/v1/complete_trajectory", json={}).json() == {"status": "completed"}
    ((trajectory,),) = data_pool.fetch_batch(1, timeout=60).groups()
    assert [step.step_index for step in trajectory] == list(range(20))
    lengths = [len(step.prompt_ids) for step in trajectory]
    assert lengths == sorted(lengths), "the steps are not in the order of the calls"


def test_a_reward_worker_is_called_by_its_actors_name(
    start_gateway: StartGateway, data_pool: DataPool, namespace: str
) -> None:
    class Scorer:
        async def compute_reward(self, request: RewardRequest) -> RewardScore:
            if "!" in request.response_text:
                raise ValueError("no shouting")
            return RewardScore(len(request.response_text) / 10, {"text": request.response_text})

    worker: Any = ray.remote(Scorer).options(name="reward_loop_worker", namespace=namespace, num_cpus=0).remote()
    with start_gateway(reward_worker_name="reward_loop_worker") as gateway:
        wait_until(lambda: is_ready(gateway.url), "the gateway to be ready")
        ids = list(b"hello")
        answer = post(f"{gateway.url}/compute_reward", json={"prompt_ids": ids, "response_ids": ids})
        assert answer.json()["reward_score"] == 0.5
        assert len(answer.json()["reward_extra_info"]["text"]) == 5
    del worker
