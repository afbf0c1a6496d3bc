"""`stepwell link`: gateways, dashboards and Atropos servers that have neither Ray nor its token use a pool on Ray."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from stepwell.pool.actors import start_pool

from rig.gateways import served_process
from rig.network_links import ServedLink, make_link_files, served_link
from rig.network_namespace import NetworkNamespace, can_make_namespaces, network_namespace
from rig.ray_cluster import RayCluster
from rig.waiting import answers, until, wait_until
from stepwell.errors import BadRequest
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.api.transport import SERVING, UNSEEN, ActorAway
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link import NetworkLink
from tests.integration.dashboard.client import BEARER, KEY, eventually, get, known

DASHBOARD_PORT, GATEWAY_PORT, ENGINE_PORT = 8200, 8100, 8001
"""In a namespace of their own every port is free."""


def link_client(link: ServedLink) -> NetworkLink:
    files = link.files
    return NetworkLink(link.host, link.port, secret_file=str(files.secret), ca_file=str(files.certificate.file))


def processes_of(parent: int) -> list[int]:
    """Its children, and theirs."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"PPid:\t{parent}\n" in (process / "status").read_text():
                found += [int(process.name), *processes_of(int(process.name))]
        except OSError:
            continue
    return found


@pytest.fixture
def listening_link(ray_cluster: RayCluster, namespace: str, tmp_path: Path) -> Iterator[ServedLink]:
    with served_link(tmp_path / "link", ray_cluster.address, namespace) as link:
        yield link


async def test_a_pool_is_used_over_the_network_as_it_is_directly(listening_link: ServedLink, namespace: str) -> None:
    await asyncio.to_thread(start_pool, PoolPlan(shards=2), namespace)
    link = link_client(listening_link)
    await asyncio.to_thread(link.start)
    client = PoolClient("data_pool", namespace, transport=link)
    await client.register_trajectory(Registration("t", "p"))
    assert await client.channel_if_open("t", "p") == "train"
    assert (await client.stats()).shards == 2
    with pytest.raises(BadRequest, match="run_long is no call that a link over a network carries"):
        await client.forget("ann")
    with pytest.raises(BadRequest, match="need a link of their own"):
        await PoolClient("other", namespace, transport=link).check()
    await link.close()


async def test_calls_are_repeated_after_the_links_process_was_killed(
    listening_link: ServedLink, namespace: str
) -> None:
    await asyncio.to_thread(start_pool, PoolPlan(), namespace)
    link = link_client(listening_link)
    await asyncio.to_thread(link.start)
    client = PoolClient("data_pool", namespace, transport=link, timeout=120.0)
    shard = client.shards.at("data_pool")
    known = (await shard.wait_news("test", {SERVING: UNSEEN}, 30.0))[SERVING].revision
    change = asyncio.create_task(shard.wait_news("test", {SERVING: known}, 60.0))
    await until(lambda: bool(link.waiting), "the call to be in flight")
    (child,) = processes_of(listening_link.process.pid)
    os.kill(child, signal.SIGKILL)
    await until(lambda: not link.is_joined, "the loss to be noticed")
    await PoolClient("data_pool", namespace).set_policy_version(7)
    assert (await change)[SERVING].value.policy_version == 7
    await link.close()


async def test_a_link_that_is_closed_leaves_no_connection_open(listening_link: ServedLink) -> None:
    link = link_client(listening_link)
    await asyncio.to_thread(link.start)
    link.keep_running()
    await until(lambda: link.starts == 1, "the connection that is kept")
    assert link._writer is not None
    connection = link._writer.get_extra_info("socket")
    assert connection.fileno() >= 0
    await link.close()
    assert connection.fileno() == -1


async def test_a_link_that_is_killed_frees_its_port_although_clients_are_connected(
    listening_link: ServedLink,
) -> None:
    link = link_client(listening_link)
    await asyncio.to_thread(link.start)
    link.keep_running()
    await until(lambda: link.is_joined, "the link to be joined")
    (child,) = processes_of(listening_link.process.pid)
    listening_link.process.kill()
    await until(lambda: not Path(f"/proc/{child}").exists(), "its process to end")
    with pytest.raises(ActorAway):
        await link.call("data_pool", "plan", (), {})
    await link.close()


def test_a_wrong_secret_ends_a_dashboard_with_one_clear_line(listening_link: ServedLink, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("x" * 64)
    wrong.chmod(0o600)
    ended = stepwell("dashboard", {**listening_link.client_flags, "link_secret_file": wrong})
    assert ended.returncode == 1
    assert ended.stderr == (
        "stepwell dashboard: the link does not know this secret: --link-secret-file must have a secret that is also "
        "in the --secret-file of `stepwell link`\n"
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"secret_file": "short"}, "less than 32 characters, so that it could be guessed; make one with"),
        ({"secret_file": "open"}, "other users can read or change it (its mode is 0644): chmod 600 open"),
        ({"tls_cert": "short"}, "--tls-cert short and --tls-key "),
        ({"listen": "192.0.2.1:1"}, "cannot listen on 192.0.2.1:1"),
    ],
)
def test_a_link_that_would_be_unsafe_does_not_start(change: Mapping[str, object], why: str, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("short")
    (tmp_path / "short").chmod(0o600)
    (tmp_path / "open").write_text("x" * 64)
    (tmp_path / "open").chmod(0o644)
    files = make_link_files(tmp_path / "link")
    flags = {"listen": "127.0.0.1:1", "ray_address": "127.0.0.1:1", **files.server_flags, **change}
    ended = stepwell("link", flags, cwd=tmp_path)
    assert ended.returncode == 1
    assert why in ended.stderr


def stepwell(command: str, flags: Mapping[str, object], cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", "stepwell", command]
    for name, value in flags.items():
        line += [f"--{name.replace('_', '-')}", str(value)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)


def test_an_atropos_server_hands_out_batches_over_a_link(
    listening_link: ServedLink, namespace: str, tmp_path: Path
) -> None:
    start_pool(PoolPlan(shards=2), namespace)
    with (
        served_process("stepwell", "atropos", flags=listening_link.client_flags, log=tmp_path / "log") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        trainer = {
            "wandb_group": "",
            "wandb_project": "",
            "batch_size": 4,
            "max_token_len": 64,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": 10,
        }
        assert client.post("/register", json=trainer).status_code == 200
        for number in range(2):
            group = {"tokens": [[1, 2, number]] * 2, "masks": [[-100, 2, number]] * 2, "scores": [0.0, 1.0]}
            assert client.post("/scored_data", json=group).status_code == 200
        wait_until(lambda: client.get("/batch").json()["batch"] is not None, "a batch")


# -- machines without Ray ----------------------------------------------------------------------------------------------


@contextmanager
def process_inside(
    inside: NetworkNamespace, *command: str, log: Path, url: str, **flags: object
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process in the namespace that knows nothing of Ray, once `url` answers."""
    line = inside.command(sys.executable, "-m", *command)
    for name, value in flags.items():
        line += [f"--{name.replace('_', '-')}", str(value)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with log.open("ab") as output:
        process = subprocess.Popen(line, stdout=output, stderr=output, env=env)
    try:
        wait_until(lambda: process.poll() is not None or answers(url), url)
        assert process.poll() is None, log.read_text()
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def reaches(inside: NetworkNamespace, host: str, port: int) -> bool:
    code = f"import socket; socket.create_connection(({host!r}, {port}), 2)"
    return subprocess.run(inside.command(sys.executable, "-c", code), capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root, and Linux's ip and tc")
async def test_a_gateway_and_a_dashboard_on_a_machine_without_ray_record_complete_and_show(
    ray_cluster: RayCluster, namespace: str, tiny_model: Path, tmp_path: Path
) -> None:
    await asyncio.to_thread(start_pool, PoolPlan(shards=2), namespace)
    with ExitStack() as stack:
        inside = stack.enter_context(network_namespace())
        link = await asyncio.to_thread(
            stack.enter_context,
            served_link(tmp_path / "link", ray_cluster.address, namespace, host=inside.outside),
        )
        ray_port = int(ray_cluster.address.rpartition(":")[2])
        assert reaches(inside, inside.outside, link.port)
        assert not reaches(inside, inside.outside, ray_port)
        assert not reaches(inside, "127.0.0.1", ray_port)

        def start(*command: str, port: int, path: str = "/health", **flags: object) -> "subprocess.Popen[bytes]":
            url = f"http://{inside.inside}:{port}{path}"
            started = process_inside(inside, *command, log=tmp_path / command[-1], url=url, port=port, **flags)
            return stack.enter_context(started)

        engine = stack.enter_context(engine_inside(inside, tmp_path / "engine"))
        gateway_url, dashboard_url = (f"http://{inside.inside}:{port}" for port in (GATEWAY_PORT, DASHBOARD_PORT))
        common: dict[str, Any] = {"host": inside.inside, "tokenizer_path": tiny_model, **link.client_flags}
        with environment(STEPWELL_GATEWAY_CONTROL_KEYS=KEY, STEPWELL_DASHBOARD_CONTROL_KEYS=KEY):
            gateway = await asyncio.to_thread(
                start,
                *("stepwell", "gateway"),
                port=GATEWAY_PORT,
                data_pool_name="data_pool",
                vllm_addresses=engine,
                prompt_length=2048,
                response_length=64,
                **common,
            )
            dashboard = await asyncio.to_thread(
                start, "stepwell", "dashboard", port=DASHBOARD_PORT, gateways=gateway_url, **common
            )
        for process in (gateway, dashboard):
            assert not uses_ray(process.pid)
        async with (
            httpx.AsyncClient(base_url=gateway_url, headers=BEARER, timeout=60) as agents,
            httpx.AsyncClient(base_url=dashboard_url, headers=BEARER, timeout=60) as page,
        ):
            opened = (await agents.post("/init_trajectory", json={"prompt_uid": "p"})).json()
            body: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            for _ in range(2):
                said = await agents.post(f"{opened['base_url']}/chat/completions", json={"model": "tiny", **body})
                assert said.status_code == 200, said.text
            ended = await agents.post(f"{opened['base_url']}/complete_trajectory", json={"reward": 1.0})
            assert ended.json() == {"status": "completed"}, ended.text

            async def is_shown() -> bool:
                rows = (await get(page, "trajectories"))["rows"]
                return [(row["prompt_uid"], row["steps"], row["reward"]) for row in rows] == [("p", 2, 1.0)]

            await known(page, trajectories=1, texts=1)
            await eventually(is_shown, "the rollout to be shown")
            uid = (await get(page, "trajectories"))["rows"][0]["trajectory_uid"]
            view = await get(page, "trajectory", trajectory_uid=uid, prompt_uid="p")
            assert len(view["steps"]) == 2
            assert (await get(page, "status"))["pool_error"] is None
        batch = await PoolClient("data_pool", namespace).fetch_batch(1, timeout=60)
        assert [step.reward for group in batch.groups() for trajectory in group for step in trajectory] == [None, 1.0]


def uses_ray(pid: int) -> bool:
    process = Path(f"/proc/{pid}")
    return "_raylet.so" in (process / "maps").read_text() or b"RAY_" in (process / "environ").read_bytes()


@contextmanager
def engine_inside(inside: NetworkNamespace, log: Path) -> Iterator[str]:
    """A fake engine on the loopback of the namespace. Nobody outside reaches it."""
    url = f"http://127.0.0.1:{ENGINE_PORT}"
    line = inside.command(sys.executable, "-m", "rig.fake_engine", "--port", str(ENGINE_PORT))
    with log.open("wb") as output:
        process = subprocess.Popen(line, stdout=output, stderr=output)
    try:
        wait_until(lambda: url in log.read_text(), "the engine")
        yield url
    finally:
        process.kill()
        process.wait()


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
