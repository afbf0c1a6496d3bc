"""A pickle is code for whoever loads it. Pickles whose loading would make a folder are sent to every socket on which a
process of ours listens: as they are, and framed as the protocol there frames messages. None is loaded, and all goes on.

The sockets are found in the processes, so that one that is new is tried too.
"""

import os
import pickle
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest

from rig.fake_engine import FakeEngine
from rig.gateways import free_port, gateway_process, served_process
from rig.network_links import ServedLink, served_link
from rig.ray_cluster import RayCluster
from rig.threads import in_thread
from rig.waiting import wait_until
from stepwell.pool.actors import start_pool
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client.link import GREETING, NONCE_BYTES, proof_of, read_secrets
from stepwell.pool.client.link_messages import HEADER, SIZE, LinkCall

TIMEOUT = 5.0
MEDIA_TYPES = (
    *("application/json", "application/octet-stream", "application/x-pickle", "application/python-pickle"),
    *("application/vnd.apache.arrow.stream", "application/msgpack", "text/plain"),
)
PATHS = ("/init_trajectory", "/v1/chat/completions", "/submit_steps", "/feedback", "/compute_reward", "/register")
MORE_PATHS = ("/scored_data", "/atropos/scored_data", "/engines", "/forget", "/api/curate", "/metrics", "/health")
LISTENS = (
    *("start_server(", "start_unix_server(", "create_server(", ".listen(", "uvicorn.Config(", "create_unix_server("),
    *("socketserver", "HTTPServer(", "multiprocessing.connection", "grpc.server"),
)


class MakesFolder:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


@dataclass(frozen=True)
class Socket:
    family: socket.AddressFamily
    address: Any
    pid: int

    def connect(self) -> socket.socket:
        end = socket.socket(self.family, socket.SOCK_STREAM)
        end.settimeout(TIMEOUT)
        end.connect(self.address)
        return end


@dataclass(frozen=True)
class Running:
    """All servers of ours, with what shows that they go on."""

    pids: list[int]
    link: ServedLink
    urls: list[str]


@pytest.fixture
def running(ray_cluster: RayCluster, namespace: str, tiny_model: Path, tmp_path: Path) -> Iterator[Running]:
    """A link for other machines; a dashboard, an Atropos server and a gateway behind it; a gateway with two workers on
    Ray, which have a local link and share a watch of the engines."""
    start_pool(PoolPlan(), namespace)
    with ExitStack() as stack:
        engine = stack.enter_context(in_thread(FakeEngine()))
        link = stack.enter_context(served_link(tmp_path / "link", ray_cluster.address, namespace))
        common = {"data_pool_name": "data_pool", "vllm_addresses": engine.url, "tokenizer_path": tiny_model}
        behind: dict[str, Any] = {**common, **link.client_flags, "atropos": True}
        on_ray: dict[str, Any] = {**common, "ray_address": ray_cluster.address, "ray_namespace": namespace}
        first = _port_before_free_ones()
        servers = [
            stack.enter_context(gateway_process(tmp_path / "gateway", **behind)),
            stack.enter_context(gateway_process(tmp_path / "workers", port=first, workers=2, **on_ray)),
            *(
                stack.enter_context(served_process("stepwell", name, flags=link.client_flags, log=tmp_path / name))
                for name in ("dashboard", "atropos")
            ),
        ]
        urls = [*(server.url for server in servers), *(f"http://127.0.0.1:{first + n}" for n in (1, 2))]
        processes = [link.process, *(server.process for server in servers)]
        wait_until(lambda: all(map(_is_healthy, urls)), "all servers")
        yield Running([pid for process in processes for pid in _tree(process.pid)], link, urls)


def _port_before_free_ones() -> int:
    while True:
        port = free_port()
        with suppress(OSError), socket.create_server(("", port + 1)), socket.create_server(("", port + 2)):
            return port


def _is_healthy(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=TIMEOUT).status_code == 200
    return False


def _tree(pid: int) -> list[int]:
    """A process and those that it started."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(found for file in children for child in file.read_text().split() for found in _tree(int(child)))]


def _inodes(pid: int) -> set[str]:
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.add(os.readlink(descriptor))
    return {name[8:-1] for name in found if name.startswith("socket:[")}


def listening_sockets(pid: int) -> list[Socket]:
    """TCP on any address, and unix sockets with a path."""
    own, found = _inodes(pid), []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *more = line.split()
        if state == "0A" and more[5] in own:
            found.append(Socket(socket.AF_INET, ("127.0.0.1", int(local.rpartition(":")[2], 16)), pid))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        *_, flags, _, _, inode, path = line.split() if line.count("/") else [*line.split(), ""]
        if flags == "00010000" and inode in own and path:
            found.append(Socket(socket.AF_UNIX, path, pid))
    return found


def joined_ray(pid: int) -> bool:
    """Such a process has sockets of Ray's own, which are guarded by Ray's token."""
    return "_raylet.so" in Path(f"/proc/{pid}/maps").read_text()


def pickles_of(path: Path) -> list[bytes]:
    """Alone, and within a message of ours, by every protocol."""
    objects = (MakesFolder(path), LinkCall("data_pool", "run", [[MakesFolder(path)]], {}))
    return [pickle.dumps(each, protocol) for each in objects for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]


def framed(*parts: bytes) -> bytes:
    """As a link frames a message."""
    body = b"".join((*(SIZE.pack(len(part)) for part in parts), *parts))
    return HEADER.pack(1, len(body), len(parts)) + body


def frames_of(raw: bytes) -> list[bytes]:
    """As it is; as a line; after lengths of four and eight bytes, in both orders; as a link's message; in one."""
    lengths = [len(raw).to_bytes(size, order) + raw for size in (4, 8) for order in ("little", "big")]
    inside = framed(msgpack.packb([raw, msgpack.ExtType(0, raw)]))
    return [raw, raw + b"\n", *lengths, framed(raw), framed(raw, raw), inside]


def send(end: socket.socket, data: bytes) -> None:
    """And wait until the other side has read it, or closes."""
    with end, suppress(OSError):
        end.sendall(data)
        with suppress(OSError):
            end.shutdown(socket.SHUT_WR)
        while end.recv(2**16):
            pass


def secured(link: ServedLink, answer: bytes = b"") -> ssl.SSLSocket:
    """A connection to the link on which the nonce was answered; with the proof of the secret, unless told."""
    context = ssl.create_default_context(cafile=str(link.files.certificate.file))
    end = context.wrap_socket(socket.create_connection((link.host, link.port), TIMEOUT), server_hostname=link.host)
    hello = b""
    while len(hello) < len(GREETING) + NONCE_BYTES:
        hello += end.recv(1024)
    secret = read_secrets(str(link.files.secret))[0]
    end.sendall(answer or proof_of(secret, hello[len(GREETING) :]))
    return end


def test_no_process_of_ours_loads_a_pickle_that_comes_over_a_socket(running: Running, tmp_path: Path) -> None:
    made = tmp_path / "made"
    raws = pickles_of(made)
    ports = {running.link.port, *(int(url.rpartition(":")[2]) for url in running.urls)}
    tried = set()
    for found in {each.address: each for pid in running.pids for each in listening_sockets(pid)}.values():
        is_ours = found.address[1] in ports or str(found.address).endswith("/link")
        if joined_ray(found.pid) and not is_ours:
            continue
        tried.add(found.address)
        for data in (raws[-1], *frames_of(raws[0]), *frames_of(raws[len(raws) // 2])):
            send(found.connect(), data)
    assert {address[1] for address in tried if isinstance(address, tuple)} == ports
    assert {Path(address).name for address in tried if isinstance(address, str)} == {"link", "engines"}

    for raw in (raws[0], raws[-1]):
        send(secured(running.link, raw), b"")
        for data in frames_of(raw):
            send(secured(running.link), data)

    with httpx.Client(timeout=60) as client:
        for url in running.urls:
            for path in (*PATHS, *MORE_PATHS):
                for kind in MEDIA_TYPES:
                    client.post(f"{url}{path}", content=raws[-1], headers={"Content-Type": kind})
    assert not made.exists()
    assert all(map(_is_healthy, running.urls))
    pickle.loads(raws[-1])
    assert made.exists(), "the pickles do nothing, so that this test shows nothing"


def test_the_modules_that_listen_are_those_that_were_tried() -> None:
    """A new one is to be started above. The doctor serves the gateway's application for itself, on loopback, and logs
    requests beside it; two more only look for a free port."""
    package = Path(__file__).parents[2] / "src" / "stepwell"
    listening = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if any(words in file.read_text() for words in LISTENS)
    }
    tried = {"commands/sections.py", "commands/gateway.py", "engines/discovery.py"}
    links = {"pool/client/link_process.py"}
    others = {"doctor/local_gateway.py", "common/listening.py", "commands/up.py"}
    assert listening == tried | links | others


def test_pickles_are_read_only_by_what_wrote_them() -> None:
    """A child that runs reward functions reads samples of the worker that started it, and a shard what it has packed
    itself. Ray's own wire between the processes that have joined it is not ours."""
    package = Path(__file__).parents[2] / "src" / "stepwell"
    loading = {str(file.relative_to(package)) for file in package.rglob("*.py") if "pickle.load" in file.read_text()}
    assert loading == {"rewards/runner/child_main.py", "pool/state/stored_step.py"}
