"""An environment and a trainer at the real Atropos-compatible server, over a pool in memory."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.access.access_keys import AccessKeys
from stepwell.atropos.app import create_atropos
from stepwell.envs.loop import lifecycle
from stepwell.envs.rollout_server import pack_group
from stepwell.errors import RolloutServerRefused
from tests.integration.envs.counting import CountingEnv, counting

KEY = "a-control-key-for-tests"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@contextlib.asynccontextmanager
async def atropos_server(pool: LocalPool) -> AsyncIterator[str]:
    app: Any = create_atropos(pool=pool, keys=AccessKeys([KEY]), state=None)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False))
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started or serving.done(), "the server to start")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


class Trainer:
    """Registers and polls, as Atropos' example does."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.groups: list[dict[str, Any]] = []

    async def register(self, **wanted: Any) -> None:
        trainer = {"wandb_group": "g", "wandb_project": "p", "batch_size": 8, "max_token_len": 64, "starting_step": 0}
        trainer |= {"checkpoint_dir": "checkpoints", "save_checkpoint_interval": 2, "num_steps": 5, **wanted}
        (await self.client.post("register", json=trainer)).raise_for_status()
        assert await self.batch() is False

    async def batch(self) -> bool:
        answer = (await self.client.get("batch")).raise_for_status().json()["batch"]
        self.groups += answer or []
        return answer is not None

    async def train(self, batches: int) -> None:
        while batches:
            batches -= await self.batch()
            await asyncio.sleep(0.01)

    async def queue_size(self) -> int:
        return int((await self.client.get("status")).json()["queue_size"])

    async def check_none_lost_or_doubled(self, env: CountingEnv) -> None:
        """What was taken and what still waits is what was made, each once."""
        items = [group["tokens"][0][0] for group in self.groups]
        assert len(items) == len(set(items)) == 10
        assert len(items) + await self.queue_size() == env.groups_delivered == len(env.begun)


@contextlib.asynccontextmanager
async def training(url: str, **wanted: Any) -> AsyncIterator[Trainer]:
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEY}"}) as client:
        trainer = Trainer(client)
        await trainer.register(**wanted)
        yield trainer


@pytest.mark.parametrize("path", ["", "/channel/validation"])
async def test_every_group_reaches_the_trainer_once_and_as_it_was_made(path: str, tmp_path: Path) -> None:
    async with atropos_server(LocalPool()) as url, training(url + path) as trainer:
        env = counting(url + path, rollout_server_key=KEY, total_steps=-1)
        serving = asyncio.create_task(lifecycle.serve(env))
        await trainer.train(5)
        await serving
        await trainer.check_none_lost_or_doubled(env)
        group = trainer.groups[0]
        assert group["masks"] == [[-100, 1, 2]] * 4
        assert group["inference_logprobs"] == [[1.0, -0.5, -0.25]] * 4
        assert sorted(group["scores"]) == [0.0, 0.0, 1.0, 1.0]
        assert group["policy_versions"] == [3] * 4
        assert (tmp_path / "checkpoints/env_checkpoints/CountingEnv_0/step-5.json").exists()


async def test_a_trainer_that_pauses_finds_no_more_than_the_limit() -> None:
    async with atropos_server(LocalPool()) as url, training(url) as trainer:
        env = counting(url, rollout_server_key=KEY, total_steps=-1, max_batches_offpolicy=2)
        serving = asyncio.create_task(lifecycle.serve(env))
        for _ in range(5):
            await until(lambda: env.groups_delivered >= len(trainer.groups) + 4, "the queue to be full")
            assert await trainer.queue_size() == 4
            await trainer.train(1)
        await serving
        await trainer.check_none_lost_or_doubled(env)


async def test_nothing_is_lost_or_doubled_while_the_pool_is_away_or_loses_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = LocalPool()
    async with atropos_server(pool) as url, training(url) as trainer:
        env = counting(url, rollout_server_key=KEY, total_steps=-1)
        env.may_finish.clear()
        serving = asyncio.create_task(lifecycle.serve(env))
        await until(lambda: len(env.begun) == 2, "work under way")
        pool.away, pool.transport.loses_answers = True, 2
        env.may_finish.set()
        await until(lambda: caplog.text.count("a group is sent again") > 2, "groups to be sent in vain")
        assert env.groups_delivered == 0
        pool.away = False
        await trainer.train(5)
        await serving
        await trainer.check_none_lost_or_doubled(env)
        assert not (tmp_path / "unsent.jsonl").exists()


async def test_a_wrong_key_is_an_end_in_words() -> None:
    async with atropos_server(LocalPool()) as url, training(url):
        with pytest.raises(RolloutServerRefused, match="this needs a key with the role environment, or a control key"):
            await lifecycle.serve(counting(url, rollout_server_key="another"))


async def test_json_and_arrow_bring_the_same_group() -> None:
    env = CountingEnv(counting().config)
    group, _ = await env.collect_trajectories(5)
    group |= {"messages": [[{"role": "user", "content": "?"}]] * 4, "group_overrides": {"x": 1}, "env_id": None}
    async with atropos_server(LocalPool()) as url, training(url) as trainer:
        for arrow in (False, True):
            body, headers = pack_group(group, arrow=arrow)
            headers |= {"Idempotency-Key": str(arrow)}
            answer = await trainer.client.post("scored_data", content=body, headers=headers)
            assert answer.raise_for_status().json()["status"] == "received"
        await trainer.train(1)
        as_json, as_arrow = trainer.groups
        assert as_json == as_arrow
        assert as_json["messages"] == group["messages"]
