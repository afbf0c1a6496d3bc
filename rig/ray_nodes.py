"""A Ray cluster of several nodes on this machine, whose head and nodes can be killed and started again.

The test's own process does not join it.
"""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rig.gateways import free_port
from rig.waiting import wait_until

from rig import ray_cluster  # isort: skip # sets Ray's environment before Ray is imported

STORE = 80 * 2**20
"""Ray's smallest object store is 75 MiB."""
LOOPBACK = "127.0.0.1"


class RayNodes:
    """Use it through `ray_nodes`."""

    def __init__(self, redis: str | None = None, host: str = LOOPBACK) -> None:
        """`redis` is the address of a Redis that keeps the head's state; without it, a new head knows nothing. Every
        node listens on `host`."""
        self.address = f"{host}:{free_port()}"
        self._host = host
        self._redis = redis
        self.settings: dict[str, str] = {
            **ray_cluster.SETTINGS,
            "RAY_external_storage_namespace": f"test-{secrets.token_hex(4)}",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600" if redis else "60",
        }
        """Ray's, for the processes of every node."""
        self._head: Any = None
        self._nodes: dict[Any, dict[str, Any]] = {}
        """With what they were started."""

    def start_head(self, **params: Any) -> None:
        """At the same address as before. The head offers no CPUs unless told."""
        port = int(self.address.split(":")[1])
        given = {"num_cpus": 0, "node_ip_address": self._host, "gcs_server_port": port, **params}
        if self._redis is not None:
            given |= {"external_addresses": [self._redis] * 2, "num_redis_shards": 1}
        with _environment(self.settings):
            self._head = start_node(given, is_head=True)

    def kill_head(self) -> None:
        """SIGKILL to all its processes."""
        kill_node_processes(self._head)

    def add_node(self, **params: Any) -> Any:
        """Another node, with a raylet of its own. Its processes get the environment `env_vars`."""
        with _environment({**self.settings, **params.get("env_vars", {})}):  # Ray itself overrides LD_PRELOAD
            node = start_node(self.node_params(**params), is_head=False)
        self._nodes[node] = params
        return node

    def node_params(self, **params: Any) -> dict[str, Any]:
        """With what a node is started that joins this cluster, on this host unless told."""
        return {"gcs_address": self.address, "num_cpus": 1, "node_ip_address": self._host, **params}

    def kill_node(self, node: Any) -> None:
        del self._nodes[node]
        kill_node_processes(node)

    def replace_nodes(self) -> None:
        """Start all nodes but the head's again, as a supervisor does for nodes whose head has lost its state."""
        for node, params in list(self._nodes.items()):
            self.kill_node(node)
            self.add_node(**params)

    def raylets(self) -> set[int]:
        """The processes whose children are the actors of this cluster."""
        nodes = [node for node in (self._head, *self._nodes) if node is not None]
        return {raylet.process.pid for node in nodes for raylet in node.all_processes.get("raylet", ())}

    def close(self) -> None:
        for node in (*self._nodes, self._head):
            if node is not None:
                kill_node_processes(node)

    def run(self, *command: str, **flags: object) -> str:
        """A `stepwell` command on this cluster; returns its output."""
        line = [sys.executable, "-m", "stepwell", *command, "--ray-address", self.address]
        for name, value in flags.items():
            line += [f"--{name.replace('_', '-')}", str(value)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


@contextmanager
def ray_nodes(redis: str | None = None, host: str = LOOPBACK) -> Iterator[RayNodes]:
    """A cluster with a head. Further nodes are added by the test."""
    nodes = RayNodes(redis, host)
    try:
        nodes.start_head()
        yield nodes
    finally:
        nodes.close()


@contextmanager
def joined_node(**params: Any) -> Iterator[str]:
    """Another node, without CPUs unless told, of the cluster that this process has joined; gives its id."""
    import ray

    def is_alive() -> bool:
        return any(known["NodeID"] == node.node_id and known["Alive"] for known in ray.nodes())  # type: ignore[no-untyped-call]

    node = start_node({"gcs_address": ray.get_runtime_context().gcs_address, "num_cpus": 0, **params}, is_head=False)
    try:
        wait_until(is_alive, "the node to join")
        yield node.node_id
    finally:
        kill_node_processes(node)
        wait_until(lambda: not is_alive(), "Ray to know that the node is gone")


@contextmanager
def redis_server() -> Iterator[str]:
    """A Redis on loopback, in memory; gives its address."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            ["redis-server", "--port", str(port), "--bind", LOOPBACK, "--save", "", "--dir", folder],
            stdout=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: _pings(port), "redis-server to answer")
            yield f"{LOOPBACK}:{port}"
        finally:
            process.kill()
            process.wait()


def has_redis() -> bool:
    return shutil.which("redis-server") is not None


def start_node(params: Mapping[str, Any], *, is_head: bool) -> Any:
    """As ray.cluster_utils does, but without writing the address where other programs on this machine look for it, and
    without the server of Ray's own dashboard, which takes seconds to import."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class BareNode(Node):
        def start_api_server(self, **kwargs: object) -> None:
            pass

    common = {
        "num_gpus": 0,
        "object_store_memory": STORE,
        "min_worker_port": 0,
        "max_worker_port": 0,
        "include_dashboard": False,
        "include_log_monitor": False,
        "no_monitor": True,  # of the autoscaler
        "dashboard_agent_listen_port": None,
    }
    return BareNode(RayParams(**{**common, **params}), head=is_head, shutdown_at_exit=False, spawn_reaper=True)


def kill_node_processes(node: Any) -> None:
    node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _pings(port: int) -> bool:
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False
