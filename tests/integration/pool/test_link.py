"""The link to Ray: a pool that is reached through a child process, and what becomes of calls when the child ends."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import ray
from stepwell.pool.actors import start_pool

from rig.actors import pid_of
from rig.builders import make_step
from rig.gateways import free_port
from rig.ray_cluster import RayCluster
from rig.waiting import until, wait_until
from stepwell.errors import PoolUnavailable, RayUnreachable, UnknownTrajectory
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.api.transport import SERVING, UNSEEN, ActorAway, ActorFailed
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link import RayLink, SharedLink


@pytest.fixture
async def link(ray_cluster: RayCluster, namespace: str) -> AsyncIterator[RayLink]:
    link = RayLink(ray_cluster.address, namespace)
    await asyncio.to_thread(link.start)
    yield link
    await link.close()


def link_pid(link: RayLink) -> int:
    assert link.process is not None
    return link.process.pid


class Scribe:
    """An actor of its own, for what a shard does not do."""

    async def fail(self) -> None:
        raise KeyError("no such page")


@pytest.fixture
def scribe(ray_cluster: RayCluster, namespace: str) -> Any:
    return ray.remote(Scribe).options(name="scribe", namespace=namespace, num_cpus=0).remote()


async def test_a_pool_is_used_through_the_link_as_it_is_directly(link: RayLink, namespace: str) -> None:
    await asyncio.to_thread(start_pool, PoolPlan(shards=2), namespace)
    client = PoolClient("data_pool", namespace, transport=link)
    await client.register_trajectory(Registration("t", "p"))
    step = make_step(trajectory_uid="t", prompt_uid="p")
    assert await client.submit_steps([step]) == ["accepted"]
    assert await client.channel_if_open("t", "p") == "train"
    with pytest.raises(UnknownTrajectory):
        await client.complete_trajectory("nobody", "p", None)
    await client.complete_trajectory("t", "p", 1.0)
    (group,) = (await client.fetch_batch(1, timeout=60)).groups()
    assert [[found.uid for found in trajectory] for trajectory in group] == [[step.uid]]


async def test_a_call_in_flight_is_repeated_after_the_link_was_killed(link: RayLink, namespace: str) -> None:
    await asyncio.to_thread(start_pool, PoolPlan(), namespace)
    client = PoolClient("data_pool", namespace, transport=link)
    shard = client.shards.at("data_pool", timeout=60.0)
    known = (await shard.wait_news("test", {SERVING: UNSEEN}, 30.0))[SERVING].revision
    change = asyncio.create_task(shard.wait_news("test", {SERVING: known}, 60.0))
    await until(lambda: bool(link.waiting), "the call to be in flight")
    os.kill(link_pid(link), signal.SIGKILL)
    await until(lambda: not link.is_joined, "the loss to be noticed")
    await client.set_policy_version(7)
    assert (await change)[SERVING].value.policy_version == 7
    assert link.starts == 2


async def test_processes_that_wait_through_one_link_hear_of_the_shard_that_follows_a_killed_one(
    ray_cluster: RayCluster, namespace: str, tmp_path: Path
) -> None:
    await asyncio.to_thread(start_pool, PoolPlan(), namespace)
    path = str(tmp_path / "link")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        links = [RayLink(ray_cluster.address, namespace, listener=listener), SharedLink(path), SharedLink(path)]
        for link in links:
            await asyncio.to_thread(link.start)
        clients = [PoolClient("data_pool", namespace, transport=link) for link in links]
        following = [asyncio.create_task(client.follow()) for client in clients]
        await until(lambda: all(client.serving is not None for client in clients), "all to be told", 30)
        epoch = clients[0].serving.epoch if clients[0].serving else ""
        await until(lambda: all(link.waiting for link in links), "all to wait", 30)
        os.kill(await asyncio.to_thread(pid_of, "data_pool", namespace), signal.SIGKILL)
        await clients[0].set_policy_version(5, check=False)
        await until(lambda: {client.policy_version for client in clients} == {5}, "all to hear of the version", 60)
        assert epoch not in {client.serving.epoch for client in clients if client.serving}
        for task in following:
            task.cancel()
        for link in reversed(links):
            await link.close()


async def test_a_link_that_is_silent_is_replaced(ray_cluster: RayCluster, namespace: str) -> None:
    await asyncio.to_thread(start_pool, PoolPlan(), namespace)
    link = RayLink(ray_cluster.address, namespace, silence=5.0)
    await asyncio.to_thread(link.start)
    client = PoolClient("data_pool", namespace, transport=link)
    assert await client.channel_if_open("nobody", "p") is None
    stopped = link_pid(link)
    os.kill(stopped, signal.SIGSTOP)
    assert await client.channel_if_open("nobody", "p") is None
    assert link_pid(link) != stopped
    await link.close()


async def test_an_exception_of_an_actor_arrives_with_its_traceback(link: RayLink, scribe: Any) -> None:
    with pytest.raises(ActorFailed, match="no such page") as caught:
        await link.call("scribe", "fail", (), {})
    assert caught.value.reason == "KeyError: 'no such page'"
    assert "in fail" in caught.value.traceback


async def test_a_pool_that_is_not_there_is_named(link: RayLink, namespace: str) -> None:
    with pytest.raises(PoolUnavailable, match=f"no DataPool named 'nothing' in Ray namespace '{namespace}'"):
        await PoolClient("nothing", namespace, transport=link).check()


async def test_without_a_cluster_calls_fail_at_once_and_say_why(namespace: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    link = RayLink(address, namespace)
    await asyncio.to_thread(link.start)
    with pytest.raises(ActorAway, match=f"no Ray cluster listens at {address}"):
        await link.call("data_pool", "stats", (), {})
    await link.close()


async def test_a_wrong_token_is_refused_at_the_start(
    ray_cluster: RayCluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with pytest.raises(RayUnreachable, match="its token is missing or wrong"):
        await asyncio.to_thread(RayLink(ray_cluster.address, namespace).start)


PARENT = """
import os, sys, time
from stepwell.pool.client.link import RayLink
link = RayLink(sys.argv[1], "default")
link.start()
print(link.process.pid, flush=True)
time.sleep(600)
"""


def test_the_link_ends_with_a_process_that_is_killed(ray_cluster: RayCluster) -> None:
    command = [sys.executable, "-c", PARENT, ray_cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: not is_alive(child), "the link to end")


def is_alive(pid: int) -> bool:
    """A zombie has ended."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
