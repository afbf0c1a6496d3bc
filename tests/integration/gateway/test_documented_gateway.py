"""The examples of Claw-R1's document on its gateway, run as they stand there: its command line, calls and client."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.threads import in_thread
from rig.waiting import wait_until
from stepwell.common.listening import ServedHosts
from stepwell.pool.client import DataPool, PoolClient
from stepwell.rewards.runner.messages import Job
from stepwell.rewards.worker import RewardPlan, start_rewards
from tests.integration.gateway.conftest import StartGateway

SAMPLE = """
from openai import OpenAI

client = OpenAI(base_url="http://gateway:8100/abc123/1", api_key="not-needed")
response = client.chat.completions.create(model="qwen", messages=[{"role": "user", "content": "Hello"}])
"""
REWARD = """
def reward(sample):
    return 0.75 if sample.metadata["ground_truth"] == "7" else 0.0
"""
STEP: dict[str, Any] = {
    "prompt_ids": [1, 2, 3],
    "response_ids": [4, 5],
    "reward": 0.5,
    "trajectory_uid": "white",
    "prompt_uid": "p",
    "step_index": 0,
    "policy_version": 0,
    "is_last": True,
    "metadata": {"data_source": "gsm8k"},
}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def answer(url: str, body: Any = None) -> dict[str, Any]:
    """What a POST is answered; a call of the documented flow may have no body."""
    got = httpx.post(url, json=body, timeout=120.0)
    assert got.status_code == 200, got.text
    answered: dict[str, Any] = got.json()
    return answered


def test_the_documented_command_serves_the_seven_documented_calls(
    start_gateway: StartGateway, data_pool: DataPool, engine_thread: FakeEngine, namespace: str, tmp_path: Path
) -> None:
    """The document listens on all addresses without keys, which needs --insecure here. Each flag is the document's."""
    (tmp_path / "rewards.py").write_text(REWARD)
    plan = RewardPlan(
        name="reward_loop_worker", job=Job(function=f"{tmp_path}/rewards.py:reward", timeout=60.0, children=1)
    )
    start_rewards(plan, partial(PoolClient, "data_pool", namespace), namespace)
    with (
        in_thread(FakeEngine()) as second,
        start_gateway(
            vllm_addresses=f"{engine_thread.url},{second.url}",
            prompt_length=4096,
            response_length=1024,
            reward_worker_name="reward_loop_worker",
            host="0.0.0.0",
            insecure=True,
        ) as gateway,
    ):
        url = gateway.url
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200, "the gateway to be ready", 120)

        generated = answer(f"{url}/generate", {"prompt_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}})
        assert len(generated["token_ids"]) == 4
        assert answer(f"{url}/submit_steps", {"steps": [STEP]})["accepted"] == 1
        asked = {"prompt_ids": [1], "response_ids": [2], "dataset_fields": {"ground_truth": "7"}}
        assert answer(f"{url}/compute_reward", asked)["reward_score"] == 0.75

        base_url = answer(f"{url}/init_trajectory")["base_url"]
        answer(f"{base_url}/v1/register_trajectory", {"channel": "train", "metadata": {"data_source": "gsm8k"}})
        for _ in range(4):
            assert answer(f"{base_url}/v1/chat/completions", CHAT)["object"] == "chat.completion"
        assert answer(f"{base_url}/v1/complete_trajectory", {"reward": 1.0})["status"] == "completed"

        white, black = (data_pool.fetch_batch(1, timeout=60, untrainable=True).steps() for _ in range(2))
    assert [(step.trajectory_uid, step.reward) for step in white] == [("white", 0.5)]
    assert [(step.step_index, step.is_last) for step in black] == [(0, False), (1, False), (2, False), (3, True)]
    assert all(step.metadata["data_source"] == "gsm8k" for step in black)
    chats = [sum("chat" in seen.path for seen in engine.requests) for engine in (engine_thread, second)]
    assert min(chats) >= 1, "both engines have their turns"


@contextmanager
def name_stands_for(name: str, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Connections to any port of that host name go to the server at the URL, as DNS and a port forward would do."""
    server, real = httpx.URL(url), socket.getaddrinfo

    def resolve(host: Any, port: Any, *more: Any, **options: Any) -> Any:
        here = host in (name, name.encode())
        return real(server.host if here else host, server.port if here else port, *more, **options)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolve)
        yield


async def test_the_documented_client_sample_is_recorded_under_its_trajectory(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine serves its model as `qwen`, and a rollouter has opened the trajectory with these names."""
    hosts = ServedHosts.of("0.0.0.0", ["gateway"])
    async with (
        FakeEngine(model="qwen") as engine,
        serve_gateway(pool, [engine.url], hosts=hosts) as url,
        httpx.AsyncClient(base_url=url) as rollouter,
    ):
        opened = await rollouter.post("/init_trajectory", json={"trajectory_uid": "abc123", "prompt_uid": "1"})
        assert opened.json()["base_url"].startswith(f"{url}/abc123/1")
        with name_stands_for("gateway", url, monkeypatch):
            names: dict[str, Any] = {}
            await asyncio.to_thread(exec, SAMPLE, names)
            names["client"].close()
        await rollouter.post("/abc123/1/v1/complete_trajectory", json={"reward": 1.0})
    assert names["response"].choices[0].message.role == "assistant"
    (step,) = pool.taken()
    assert (step.trajectory_uid, step.prompt_uid, step.model, step.reward) == ("abc123", "1", "qwen", 1.0)


async def test_a_model_that_is_not_served_is_refused_with_the_names_that_are(
    pool: LocalPool, engine: FakeEngine
) -> None:
    """An agent's call of another model, a judge for example, is not to be trained as one of the policy's."""
    async with serve_gateway(pool, [engine.url]) as url, httpx.AsyncClient() as client:
        base_url = (await client.post(f"{url}/init_trajectory")).json()["base_url"]
        refused = await client.post(f"{base_url}/v1/chat/completions", json={**CHAT, "model": "qwen"})
        assert refused.status_code == 404
        assert refused.json()["error"]["message"] == (
            "the model `qwen` does not exist here; this gateway serves tiny (`default` is tiny)"
        )
        default = await client.post(f"{base_url}/v1/chat/completions", json={**CHAT, "model": "default"})
        assert default.json()["model"] == "tiny"


async def test_a_trajectory_has_its_step_counter_channel_and_metadata_until_it_is_completed(
    pool: LocalPool, engine: FakeEngine
) -> None:
    """What the document lists as the gateway's state; any gateway finds it in the pool."""
    metadata = {"data_source": "gsm8k", "reward_model": {"ground_truth": "7"}}
    async with (
        serve_gateway(pool, [engine.url]) as first,
        serve_gateway(pool, [engine.url]) as second,
        httpx.AsyncClient() as client,
    ):
        opened = (await client.post(f"{first}/init_trajectory")).json()
        path = f"/{opened['trajectory_uid']}/{opened['prompt_uid']}/v1"
        await client.post(f"{first}{path}/register_trajectory", json={"channel": "val", "metadata": metadata})
        for gateway in (first, second, first):
            assert (await client.post(f"{gateway}{path}/chat/completions", json=CHAT)).status_code == 200
        await client.post(f"{first}{path}/complete_trajectory", json={"reward": 1.0})
        assert (await client.post(f"{first}{path}/chat/completions", json=CHAT)).status_code == 404
        plain = (await client.post(f"{first}/init_trajectory")).json()
        assert await pool.channel_if_open(plain["trajectory_uid"], plain["prompt_uid"]) == "train"
    steps = pool.taken("val")
    assert [(step.step_index, step.metadata) for step in steps] == [(index, metadata) for index in range(3)]
