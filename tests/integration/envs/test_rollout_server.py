"""The rollout server from an environment's side, with the server failing in every way it can."""

import asyncio
import logging
from pathlib import Path

import orjson
import pytest

from rig.rollout_server import FakeRolloutServer
from rig.waiting import until
from stepwell.envs.rollout_server import RolloutServer
from stepwell.envs.scored_data import ScoredDataGroup
from stepwell.errors import RolloutServerAway
from stepwell.wire.scored_groups import EnvRegistration

GROUP: ScoredDataGroup = {"tokens": [[1, 2], [3, 4]], "masks": [[-100, 2], [-100, 4]], "scores": [0.0, 1.0]}


async def test_a_group_is_sent_again_while_the_server_fails_and_taken_once(tmp_path: Path) -> None:
    async with FakeRolloutServer().opened() as rollouts:
        rollouts.fails = rollouts.loses_answers = 2
        async with RolloutServer(rollouts.url, unsent=tmp_path / "unsent.jsonl") as server:
            assert await server.send(GROUP, env_id=3) == ""
        assert [group["env_id"] for group in rollouts.taken] == [3]
        assert len(rollouts.posts) == 5
        assert len(set(rollouts.posts)) == 1


async def test_what_cannot_be_sent_in_time_is_counted_and_written_down(tmp_path: Path) -> None:
    async with FakeRolloutServer().opened() as rollouts:
        rollouts.fails = 1_000
        async with RolloutServer(rollouts.url, unsent=tmp_path / "folder" / "unsent.jsonl", send_timeout=0.3) as server:
            assert "answered 500" in await server.send(GROUP, env_id=3)
            assert server.unsent == 1
    assert orjson.loads((tmp_path / "folder" / "unsent.jsonl").read_bytes()) == {**GROUP, "env_id": 3}


async def test_what_is_refused_is_not_sent_again(tmp_path: Path) -> None:
    async with FakeRolloutServer().opened() as rollouts:
        rollouts.refuses = True
        async with RolloutServer(rollouts.url, unsent=tmp_path / "unsent.jsonl") as server:
            assert "scores: no" in await server.send(GROUP, env_id=3)
        assert len(rollouts.posts) == 1


async def test_two_groups_of_equal_content_are_two_groups(tmp_path: Path) -> None:
    async with FakeRolloutServer().opened() as rollouts, RolloutServer(rollouts.url) as server:
        await asyncio.gather(server.send(GROUP, env_id=0), server.send(GROUP, env_id=0))
        assert len(rollouts.taken) == 2


async def test_a_large_group_arrives_compressed_and_whole() -> None:
    group: ScoredDataGroup = {**GROUP, "tokens": [list(range(5_000))] * 2, "masks": [[-100] * 5_000] * 2}
    async with FakeRolloutServer().opened() as rollouts, RolloutServer(rollouts.url) as server:
        assert await server.send(group, env_id=0) == ""
        assert rollouts.taken[0]["tokens"] == group["tokens"]


async def test_registering_says_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeRolloutServer().opened() as rollouts, RolloutServer(rollouts.url) as server:
        rollouts.has_trainer = False
        with caplog.at_level(logging.INFO, "stepwell.envs"):
            wanted = EnvRegistration(max_token_length=8, desired_name="env", weight=1.0, group_size=2)
            registering = asyncio.create_task(server.register_env(wanted))
            await until(lambda: "wait for trainer to start" in caplog.text, "what is waited for")
            rollouts.has_trainer = True
            registration = await registering
        assert (registration.env_id, registration.wandb_name) == (0, "env_0")


async def test_a_server_that_is_away_is_named() -> None:
    async with RolloutServer("http://127.0.0.1:9") as server:
        with pytest.raises(RolloutServerAway, match="http://127.0.0.1:9 cannot be reached"):
            await server.status(0)
