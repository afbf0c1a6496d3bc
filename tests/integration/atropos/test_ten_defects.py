"""What atroposlib's server and environments do wrong, and ours do not: a test or more for each of ten defects.

The numbers are those of docs/coming-from-atropos.md.
"""

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from stepwell.envs.group_files import group_html
from stepwell.pool.actors import start_pool

from rig.atropos.calling import AtroposClient, Group, calling, make_group
from rig.atropos.server import atropos_process, serve_atropos
from rig.fake_engine import FakeEngine
from rig.local_pool import LocalPool
from rig.ray_cluster import RayCluster
from rig.waiting import until
from stepwell.atropos.http import MAX_BODY
from stepwell.atropos.registry import SILENCE, Registry
from stepwell.envs import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem
from stepwell.envs.loop import lifecycle
from stepwell.envs.loop.progress import EnvProgress
from stepwell.envs.servers import ServerManager
from stepwell.pool.api.plan import PoolPlan
from stepwell.wire.scored_groups import EnvRegistration

KEY = "a-key-of-sufficient-length"
JSON = {"Content-Type": "application/json"}
GZIPPED = {**JSON, "Content-Encoding": "gzip"}


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AtroposClient]:
    monkeypatch.chdir(tmp_path)
    async with serve_atropos(LocalPool()) as url, calling(url) as server:
        yield server


# -- 1: what is queued or on its way lives in one process's memory ----------------------------------------------------


async def test_1_a_batch_whose_answer_was_not_read_is_served_again(server: AtroposClient) -> None:
    long = [make_group(number, size=8, length=8_000) for number in range(8)]
    await server.register(batch_size=64)
    await server.send(*long)
    await asyncio.to_thread(ask_and_hang_up, server.url)

    await until_queued(server, 8)
    assert await server.tokens() == [group["tokens"] for group in long]
    assert (await server.status())["current_step"] == 1


def ask_and_hang_up(url: str) -> None:
    """A trainer whose time is up when the answer has just begun."""
    port = int(url.rpartition(":")[2])
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8_192)
        connection.connect(("127.0.0.1", port))
        connection.sendall(b"GET /batch HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1_000).startswith(b"HTTP/1.1 200")


async def until_queued(server: AtroposClient, groups: int) -> None:
    async with asyncio.timeout(60):
        while (await server.status())["queue_size"] != groups:
            await asyncio.sleep(0.02)


@pytest.fixture
def ray_pool(ray_cluster: RayCluster, namespace: str) -> dict[str, str]:
    """The flags by which an Atropos server finds it."""
    start_pool(PoolPlan(), namespace)
    return {"ray_address": ray_cluster.address, "ray_namespace": namespace}


async def test_1_a_killed_server_loses_nothing(ray_pool: dict[str, str], tmp_path: Path) -> None:
    flags: dict[str, Any] = {**ray_pool, "state": tmp_path / "state.json"}
    sent = [make_group(number) for number in range(4)]
    with atropos_process(tmp_path / "first.log", **flags) as first:
        async with calling(first.url) as server:
            await server.register()
            await server.send(*sent)
            assert await server.tokens() == [group["tokens"] for group in sent[:2]]
        first.kill()
    with atropos_process(tmp_path / "second.log", **flags) as second:
        async with calling(second.url) as server:
            assert await server.status() == {"current_step": 1, "queue_size": 2}
            assert await server.tokens() == [group["tokens"] for group in sent[2:]]


# -- 2: what is no number is taken, and later costs a whole batch -----------------------------------------------------


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "null"])
@pytest.mark.parametrize("field", ["scores", "inference_logprobs"])
async def test_2_what_is_no_number_is_refused_where_it_comes_in(server: AtroposClient, field: str, number: str) -> None:
    await server.register(batch_size=2)
    group = make_group(1, inference_logprobs=[[1.0, -0.5, -0.5, -0.5], [1.0, -0.5, -0.5, -0.25]])
    body = json.dumps(group).replace("-0.25" if field == "inference_logprobs" else "[0.0, 1.0]", "%s")
    content = body % (f"[0.0, {number}]" if field == "scores" else number)
    answer = await server.client.post("/scored_data", content=content, headers=JSON)
    assert answer.status_code == 422
    await server.send(make_group(2))
    assert await server.tokens() == [make_group(2)["tokens"]]


# -- 3: a POST that is sent again is taken again ----------------------------------------------------------------------


async def test_3_a_group_is_taken_once_under_one_key_and_again_under_another(server: AtroposClient) -> None:
    await server.register()
    for key in ("a", "a", "b"):
        await server.client.post("/scored_data", json=make_group(1), headers={"Idempotency-Key": key})
    assert (await server.status())["queue_size"] == 2


# -- 4: the last comes first, and what is formed is forgotten ---------------------------------------------------------


async def test_4_the_oldest_groups_are_served_first_and_what_waits_is_counted(server: AtroposClient) -> None:
    groups = [make_group(number) for number in range(6)]
    await server.register()
    await server.send(*groups)
    for taken in range(0, 6, 2):
        assert await server.status() == {"current_step": taken // 2, "queue_size": 6 - taken}
        assert await server.tokens() == [group["tokens"] for group in groups[taken : taken + 2]]


async def test_4_the_policy_version_travels_with_the_data(server: AtroposClient) -> None:
    await server.register()
    await server.send(make_group(1, policy_versions=[3, 4]), make_group(2))
    batch = await server.batch()
    assert batch is not None
    assert [group["policy_versions"] for group in batch] == [[3, 4], [0, 0]]


# -- 5: one group, or one environment, stands in everyone's way -------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 4])
async def test_5_a_group_of_another_size_than_announced_is_served(server: AtroposClient, size: int) -> None:
    await server.register(batch_size=size)
    env_id = await server.register_env("env", group_size=2)
    await server.send(make_group(1, size=size, env_id=env_id))
    assert await server.tokens() == [make_group(1, size=size)["tokens"]]


async def test_5_a_group_that_does_not_fit_lets_others_pass(server: AtroposClient) -> None:
    await server.register()
    await server.send(make_group(1, size=3), make_group(2), make_group(3))
    assert await server.tokens() == [make_group(2)["tokens"], make_group(3)["tokens"]]
    await server.send(make_group(4, size=1))
    assert await server.tokens() == [make_group(1, size=3)["tokens"], make_group(4, size=1)["tokens"]]


async def test_5_an_environment_with_a_minimum_that_sends_nothing_does_not_stall_the_others(
    server: AtroposClient,
) -> None:
    await server.register()
    await server.register_env("silent", min_batch_allocation=0.5)
    busy = await server.register_env("busy")
    await server.send(make_group(1, env_id=busy), make_group(2, env_id=busy))
    assert await server.tokens() == [make_group(1)["tokens"], make_group(2)["tokens"]]


async def test_5_a_minimum_is_kept_as_soon_as_there_is_something(server: AtroposClient) -> None:
    await server.register()
    few = await server.register_env("few", min_batch_allocation=0.5)
    many = await server.register_env("many")
    await server.send(*(make_group(number, env_id=many) for number in range(3)), make_group(9, env_id=few))
    assert await server.tokens() == [make_group(0)["tokens"], make_group(9)["tokens"]]


def test_5_an_environment_that_fell_silent_no_longer_counts() -> None:
    registry = Registry()
    wanted = EnvRegistration(
        max_token_length=128, desired_name="env", weight=1.0, group_size=2, min_batch_allocation=0.5
    )
    _crashed, alive = (registry.register_env(wanted, now=0.0) for _ in range(2))
    registry.heard_from(1, now=SILENCE + 1)
    assert registry.shares(now=SILENCE + 1) == {alive.name: 0.5}
    assert registry.weight(alive, now=SILENCE + 1) == 1.0
    registry.heard_from(0, now=SILENCE + 2)
    assert registry.weight(alive, now=SILENCE + 2) == 0.5


# -- 6: an order of calls, or a weight, that nobody thought of --------------------------------------------------------


@pytest.mark.parametrize("weight", [-1.0, 0.0])
async def test_6_a_sole_environment_may_have_any_weight(server: AtroposClient, weight: float) -> None:
    await server.register()
    env_id = await server.register_env("env", weight=weight)
    assert (await server.status_env(env_id))["env_weight"] > 0


async def test_6_groups_may_come_before_the_trainer(server: AtroposClient) -> None:
    await server.send(make_group(1), make_group(2))
    await server.register_trainer(4, starting_step=7)
    assert await server.tokens() == [make_group(1)["tokens"], make_group(2)["tokens"]]
    assert (await server.status())["current_step"] == 8


# -- 7: bodies without bounds, servers without locks -----------------------------------------------------------------


async def test_7_half_a_gzip_body_is_the_senders_mistake(server: AtroposClient) -> None:
    body = gzip.compress(json.dumps(make_group(1)).encode())
    for broken in (body[:-20], b"no gzip", b""):
        answer = await server.client.post("/scored_data", content=broken, headers=GZIPPED)
        assert 400 <= answer.status_code < 500, broken
    assert (await server.status())["queue_size"] == 0


async def test_7_a_body_that_swells_is_refused(server: AtroposClient) -> None:
    bomb = gzip.compress(bytes(2 * MAX_BODY), compresslevel=1)
    answer = await server.client.post("/scored_data", content=bomb, headers=GZIPPED)
    assert answer.status_code == 413


async def test_7_no_page_of_anyone_elses_may_read_the_server(server: AtroposClient) -> None:
    answer = await server.client.get("/status", headers={"Origin": "http://elsewhere"})
    assert "access-control-allow-origin" not in answer.headers


async def test_7_with_a_key_nothing_is_destroyed_or_read_without_it() -> None:
    async with serve_atropos(LocalPool(), control_keys=[KEY]) as url, calling(url) as server:
        for method, path in (("GET", "/reset_data"), ("GET", "/batch"), ("POST", "/scored_data"), ("GET", "/status")):
            assert (await server.client.request(method, path)).status_code == 401, path
        server.client.auth = ("", KEY)  # as in http://:KEY@host, which unmodified clients can be told
        await server.register()
        await server.send(make_group(1))
        assert (await server.client.get("/reset_data")).status_code == 200
        assert (await server.status())["queue_size"] == 0


# -- 8: what is under way when an environment pauses is thrown away, and its checkpoints are empty --------------------


class SlowEnv(BaseEnv):
    """Has a few items, whose rollouts take until the test lets them go on."""

    name = "slow"
    checkpoint_fields = ("given",)

    def __init__(self, url: str, *, items: int) -> None:
        config = BaseEnvConfig(group_size=2, max_batches_offpolicy=1, max_num_workers=1, rollout_server_url=url)
        super().__init__(config, [APIServerConfig(base_url="http://127.0.0.1:9/v1")])
        self.given, self.items = 0, items
        self.has_begun, self.may_go_on = asyncio.Event(), asyncio.Event()

    async def get_next_item(self) -> int:
        if self.given == self.items:
            raise StopAsyncIteration
        self.given += 1
        return self.given

    async def collect_trajectory(self, item: int) -> tuple[ScoredDataItem, list[Any]]:
        self.has_begun.set()
        await self.may_go_on.wait()
        self.rollouts = getattr(self, "rollouts", 0) + 1
        return ScoredDataItem(
            tokens=[item, self.rollouts, 3],
            masks=[-100, self.rollouts, 3],
            scores=float(self.rollouts),
            inference_logprobs=[1.0, -0.5, -0.25],
        ), []


class Watch:
    """Knows why an environment starts nothing now."""

    def __init__(self) -> None:
        self.idle = ""

    def update(self, progress: EnvProgress) -> None:
        self.idle = progress.idle


async def test_8_what_is_under_way_when_an_environment_pauses_is_finished_and_sent(server: AtroposClient) -> None:
    env, watch = SlowEnv(server.url, items=1), Watch()
    await server.register(batch_size=2)
    serving = asyncio.create_task(lifecycle.serve(env, watch))
    await env.has_begun.wait()
    await server.send(make_group(100), make_group(101))
    await until(lambda: bool(watch.idle), "the environment to pause")
    env.may_go_on.set()
    await until_queued(server, 3)
    assert [await server.tokens() for _ in range(3)] == [
        [make_group(100)["tokens"]],
        [make_group(101)["tokens"]],
        [[[1, 1, 3], [1, 2, 3]]],
    ]
    await serving


async def test_8_a_checkpoint_holds_the_environments_state(server: AtroposClient, tmp_path: Path) -> None:
    env = SlowEnv(server.url, items=2)
    env.may_go_on.set()
    await server.register(batch_size=2, checkpoint_dir=str(tmp_path), save_checkpoint_interval=1)
    await asyncio.gather(lifecycle.serve(env), take(server, 2))
    assert newest_checkpoint(tmp_path)["given"] >= 2


def newest_checkpoint(folder: Path) -> dict[str, Any]:
    written = sorted(folder.glob("env_checkpoints/slow_0/step-*.json"))
    read: dict[str, Any] = json.loads(written[-1].read_text())
    return read


async def take(server: AtroposClient, batches: int) -> list[list[Group]]:
    taken: list[list[Group]] = []
    while len(taken) < batches:
        if (batch := await server.batch()) is not None:
            taken.append(batch)
        await asyncio.sleep(0.01)
    return taken


# -- 9: log-probabilities get lost, and a page runs what a model wrote ------------------------------------------------


async def test_9_log_probabilities_arrive_by_the_default_way_of_making_groups(server: AtroposClient) -> None:
    env = SlowEnv(server.url, items=1)
    env.may_go_on.set()
    await server.register(batch_size=2)
    _, ((group,),) = await asyncio.gather(lifecycle.serve(env), take(server, 1))
    assert group["inference_logprobs"] == [[1.0, -0.5, -0.25]] * 2


def test_9_a_page_shows_what_a_model_wrote_and_does_not_run_it() -> None:
    page = group_html(1, make_group(1), decode=lambda ids: "<script>alert(1)</script>")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


# -- 10: tokens come only from two kinds of servers -------------------------------------------------------------------


@pytest.mark.parametrize(("plain", "exactness"), [(True, "retokenized"), (False, "engine")])
async def test_10_every_openai_compatible_server_gives_sequences_to_train_on(
    tiny_model: Path, plain: bool, exactness: str
) -> None:
    async with FakeEngine(plain=plain, replies=["Hello there"]) as engine:
        config = APIServerConfig(base_url=f"{engine.url}/v1", model_name="tiny", tokenizer_name=str(tiny_model))
        manager = ServerManager([config])
        async with manager.managed_server() as session:
            await session.chat_completion(messages=[{"role": "user", "content": "Hello"}], max_tokens=32)
            (node,) = session.get_state()["nodes"]
        await manager.close()
    trained = [token for token in node.masked_tokens if token != -100]
    assert node.exactness == exactness
    assert bytes(token for token in trained if token < 256) == b"Hello there"
    assert len(node.tokens) == len(node.masked_tokens) > len(trained)
