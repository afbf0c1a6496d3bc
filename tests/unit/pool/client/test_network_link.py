"""The handshake of a link over a network: who is let in, and what strangers cost. Real sockets and TLS, no Ray."""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stepwell.pool.slices.producing import FindSession, Register, TakeUnscored

from rig.certificates import make_certificate
from rig.network_links import LinkFiles, make_link_files
from rig.waiting import until
from stepwell.commands.dashboard import DashboardSettings
from stepwell.commands.gateway import GatewaySettings
from stepwell.commands.sections import read_settings
from stepwell.errors import BadRequest, RayUnreachable
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.policy import PolicyDecision
from stepwell.pool.api.producing import Registration
from stepwell.pool.client.link import (
    GREETING,
    NONCE_BYTES,
    NetworkLink,
    proof_of,
    read_secrets,
)
from stepwell.pool.client.link_messages import NO_CALL, LinkAnswer, LinkState, frame, read_frame
from stepwell.pool.client.link_process import MOST_STRANGERS, NETWORK_CALLS, LinkListener, NetworkCalls, NetworkTerms
from stepwell.pool.client.ray_cluster import join_ray
from stepwell.pool.shard.service import ShardService
from stepwell.pool.slices.policy import AnnounceSync, Decide, ReadVersionRewards, ReportEngines
from stepwell.pool.slices.watching import ReadSeries

WAIT = 30.0


async def answer_with_arguments(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """In place of the link's server."""
    writer.writelines(frame(NO_CALL, LinkState(is_joined=True)))
    with suppress(OSError, asyncio.IncompleteReadError):
        while True:
            number, packed = await read_frame(reader)
            writer.writelines(frame(number, LinkAnswer([*packed.unpack().args])))
    writer.close()


@dataclass
class Door:
    """A listener on loopback that can be closed and opened again at the same port."""

    files: LinkFiles
    patience: float = WAIT
    port: int = 0
    clients: list[NetworkLink] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    served: list[asyncio.StreamWriter] = field(default_factory=list)

    async def open(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", self.port), backlog=256)
        self.port = self._socket.getsockname()[1]
        flags = self.files.certificate
        terms = NetworkTerms("data_pool", str(flags.file), str(flags.key), str(self.files.secret))

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.served.append(writer)
            await answer_with_arguments(reader, writer)

        self.listener = LinkListener(terms, serve, patience=self.patience)
        self._running = asyncio.create_task(self.listener.run(self._socket))

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._socket.close()
        for writer in self.served:
            writer.transport.abort()
        self.served.clear()

    def client(self, **changes: Any) -> NetworkLink:
        given = {"secret_file": str(self.files.secret), "ca_file": str(self.files.certificate.file), **changes}
        self.clients.append(NetworkLink("127.0.0.1", self.port, **given))
        return self.clients[-1]

    async def connect(self, *, plain: bool = False, **tls: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = ssl.create_default_context(cafile=str(self.files.certificate.file))
        for name, value in tls.items():
            setattr(context, name, value)
        streams = await asyncio.open_connection("127.0.0.1", self.port, ssl=None if plain else context)
        self.writers.append(streams[1])
        return streams

    async def is_refused(self, *causes: str) -> None:
        async with asyncio.timeout(WAIT):
            while not all(any(cause in why for why in self.listener.refused) for cause in causes):
                await asyncio.sleep(0.01)


MakeDoor = Callable[..., Any]


@pytest.fixture
async def make_door(tmp_path: Path) -> AsyncIterator[MakeDoor]:
    doors: list[Door] = []

    async def make(**terms: Any) -> Door:
        door = Door(make_link_files(tmp_path / f"door{len(doors)}"), **terms)
        doors.append(door)
        await door.open()
        return door

    yield make
    for door in doors:
        for client in door.clients:
            await client.close()
        for writer in door.writers:
            writer.transport.abort()
        await door.close()


async def closes(reader: asyncio.StreamReader) -> bytes:
    """What comes until the link closes the connection."""
    read = b""
    async with asyncio.timeout(WAIT):
        with suppress(OSError):
            while part := await reader.read(2**16):
                read += part
    return read


async def answers_calls(client: NetworkLink) -> bool:
    client.keep_running()
    await until(lambda: client.is_joined, "the client to be let in")
    return bool(await client.call("a", "m", [1], {}) == [1])


async def test_who_knows_the_secret_is_served_also_with_large_messages(make_door: MakeDoor) -> None:
    door = await make_door()
    client = door.client()
    await asyncio.to_thread(client.start)
    tokens = np.arange(1_000_000)
    ((answer,), text) = await asyncio.gather(client.call("a", "m", [tokens], {}), client.call("a", "m", ["x"], {}))
    assert np.array_equal(answer, tokens)
    assert text == ["x"]
    assert not door.listener.refused


async def test_a_wrong_secret_is_refused_at_the_start_and_says_why(make_door: MakeDoor, tmp_path: Path) -> None:
    door = await make_door()
    other = make_link_files(tmp_path / "other")
    with pytest.raises(RayUnreachable, match="the link does not know this secret: --link-secret-file must have"):
        await asyncio.to_thread(door.client(secret_file=str(other.secret)).start)
    await door.is_refused("it does not know the secret")
    assert not door.served


async def test_each_secret_of_the_file_lets_in_so_that_it_can_be_changed(make_door: MakeDoor, tmp_path: Path) -> None:
    newer = make_link_files(tmp_path / "newer").secret
    door = await make_door()
    await door.close()
    door.files.secret.write_text(newer.read_text() + door.files.secret.read_text())
    older = tmp_path / "older"
    older.write_text(read_secrets(str(door.files.secret))[1])
    older.chmod(0o600)
    await door.open()
    for file in (newer, older):
        assert await answers_calls(door.client(secret_file=str(file)))


async def test_a_certificate_of_another_ca_is_not_trusted(make_door: MakeDoor, tmp_path: Path) -> None:
    door = await make_door()
    other = make_certificate(tmp_path)
    with pytest.raises(RayUnreachable, match="is not trusted: .* Name its CA with --link-ca-file"):
        await asyncio.to_thread(door.client(ca_file=str(other.file)).start)
    with pytest.raises(RayUnreachable, match="is not trusted"):
        await asyncio.to_thread(door.client(ca_file=None).start)
    assert not door.served


async def test_without_tls_or_with_an_old_one_nobody_is_served(make_door: MakeDoor) -> None:
    door = await make_door()
    reader, writer = await door.connect(plain=True)
    writer.write(proof_of("x" * 64, bytes(NONCE_BYTES)) * 10)
    assert GREETING not in await closes(reader)
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        await door.connect(maximum_version=ssl.TLSVersion.TLSv1_2)
    await door.is_refused("it does not speak TLS 1.3")
    assert door.listener.refused.total() == 2
    assert await answers_calls(door.client())


async def test_a_recorded_proof_is_of_no_use(make_door: MakeDoor) -> None:
    door = await make_door()
    secret = read_secrets(str(door.files.secret))[0]
    recorded = b""
    for is_second in (False, True):
        reader, writer = await door.connect()
        hello = await reader.readexactly(len(GREETING) + NONCE_BYTES)
        recorded = recorded or proof_of(secret, hello[len(GREETING) :])
        writer.write(recorded)
        number, packed = await read_frame(reader)
        assert number == NO_CALL
        assert packed.unpack().is_refused == is_second
    assert len(door.served) == 1


async def test_a_huge_first_frame_is_not_read(make_door: MakeDoor) -> None:
    door = await make_door()
    reader, writer = await door.connect()
    huge = bytes(2**20)
    sent = 0
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(WAIT):
            while sent < 256:
                writer.write(huge)
                await writer.drain()
                sent += 1
    assert sent < 64, "megabytes of a stranger"
    await closes(reader)
    await door.is_refused("it does not know the secret")
    assert not door.served


async def test_a_slow_client_is_disconnected_before_tls_and_before_its_proof(make_door: MakeDoor) -> None:
    door = await make_door(patience=0.5)
    silent, _ = await door.connect(plain=True)
    reader, writer = await door.connect()
    writer.write(b"\0")
    await asyncio.gather(closes(silent), closes(reader))
    await until(lambda: door.listener.refused.total() == 2, "both to be counted")
    assert set(door.listener.refused) == {"it did not show the secret within 0.5 s"}


async def test_many_strangers_keep_nobody_out(make_door: MakeDoor) -> None:
    door = await make_door()
    strangers = [await door.connect(plain=True) for _ in range(MOST_STRANGERS + 20)]
    assert await answers_calls(door.client())
    await asyncio.gather(*(closes(reader) for reader, _ in strangers[:20]))
    assert door.listener.refused["too many had not shown the secret yet"] >= 20


async def test_failures_are_counted_and_few_lines_are_logged(
    make_door: MakeDoor, caplog: pytest.LogCaptureFixture
) -> None:
    door = await make_door()
    with caplog.at_level(logging.WARNING, "stepwell.pool"):
        for _ in range(50):
            _, writer = await door.connect(plain=True)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await until(lambda: door.listener.refused.total() == 50, "all to be counted")
        (line,) = [record.getMessage() for record in caplog.records if "to the link is closed" in record.getMessage()]
    assert "127.0.0.1" in line


async def test_a_client_comes_back_when_the_link_does(make_door: MakeDoor) -> None:
    door = await make_door()
    client = door.client()
    assert await answers_calls(client)
    await door.close()
    await until(lambda: not client.is_joined, "the loss to be noticed")
    await door.open()
    assert await answers_calls(client)
    assert client.connections == 2


async def test_a_client_can_start_before_the_link(make_door: MakeDoor) -> None:
    door = await make_door()
    await door.close()
    client = door.client()
    await asyncio.to_thread(client.start)
    client.keep_running()
    await door.open()
    await until(lambda: client.is_joined, "the link to be found")


class AskedOfShards:
    """In place of the shards."""

    connections = 1

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, list[Any]]] = []

    async def call(self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.calls.append((actor, method, [*args]))
        return PoolPlan(shards=2) if method == "plan" else None


@pytest.mark.parametrize(
    ("actor", "method", "why"),
    [
        ("data_pool", "run_long", "run_long is no call that a link over a network carries"),
        ("data_pool", "adopt_tombstones", "on a machine of the Ray cluster"),
        ("data_pool", "__ray_terminate__", "on a machine of the Ray cluster"),
        ("data_pool", "__ray_ready__", "on a machine of the Ray cluster"),
        ("reward_loop_worker", "compute_reward", "reward workers and other actors a process on a machine of the Ray"),
        ("other_pool", "plan", "is no shard of DataPool 'data_pool'"),
        ("data_pool-x", "plan", "is no shard"),
        ("data_pool\n", "plan", "is no shard"),
    ],
)
async def test_other_calls_are_refused_with_the_reason(actor: str, method: str, why: str) -> None:
    shards = AskedOfShards()
    with pytest.raises(BadRequest, match=why):
        await NetworkCalls("data_pool", shards).call(actor, method, (), {})
    assert not shards.calls


@pytest.mark.parametrize(
    "operation",
    [
        Decide(PolicyDecision(1, "promote", "ana", "why", 0.0), None, 1),
        AnnounceSync(),
        ReadVersionRewards("train"),
        TakeUnscored(1, 60.0, "lease"),
        "what is no operation",
    ],
    ids=lambda operation: type(operation).__name__,
)
async def test_operations_of_trainers_and_reward_workers_are_refused_with_all_of_their_message(operation: Any) -> None:
    shards = AskedOfShards()
    calls = NetworkCalls("data_pool", shards)
    for method, sent in (("run", [ReadSeries(60.0), operation]), ("run_flushed", operation)):
        with pytest.raises(BadRequest, match="is no call that a link over a network carries"):
            await calls.call("data_pool", method, [sent], {})
    assert not shards.calls


async def test_operations_of_gateways_and_dashboards_go_through() -> None:
    shards = AskedOfShards()
    sent = [ReadSeries(60.0), Register(Registration("t", "p")), ReportEngines("g", {}), FindSession("u", "digest")]
    await NetworkCalls("data_pool", shards).call("data_pool", "run", [sent], {})
    assert shards.calls == [("data_pool", "run", [sent])]


async def test_a_client_cannot_decide_how_many_shards_there_are() -> None:
    shards = AskedOfShards()
    await NetworkCalls("data_pool", shards).call("data_pool-1", "adopt_plan", [PoolPlan(shards=9, revision=9)], {})
    assert shards.calls == [("data_pool", "plan", []), ("data_pool-1", "adopt_plan", [PoolPlan(shards=2)])]


def test_every_call_that_a_link_carries_is_one_of_a_shard() -> None:
    assert [name for name in NETWORK_CALLS if not callable(getattr(ShardService, name, None))] == []


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("x" * 64, 0o644, "other users can read or change it .* chmod 600"),
        ("x" * 64, 0o620, "other users can read or change it"),
        ("x" * 31, 0o600, "less than 32 characters, so that it could be guessed; make one with: openssl rand -hex 32"),
        (f"{'x' * 64}\nshort\n", 0o600, "less than 32 characters"),
        ("\n", 0o600, "less than 32 characters"),
        (None, 0o600, "cannot be read .* make one with"),
    ],
)
def test_a_file_that_is_no_place_for_a_secret_is_refused(text: str | None, mode: int, why: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(BadRequest, match=why):
        read_secrets(str(file))


def test_a_secret_that_its_group_reads_is_taken_as_kubernetes_mounts_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("x" * 64)
    file.chmod(0o440)
    assert read_secrets(str(file)) == ["x" * 64]


GATEWAY = (
    *("--data-pool-name", "p", "--vllm-addresses", "http://e:1", "--tokenizer-path", "t"),
    *("--prompt-length", "1", "--response-length", "1", "--ray-address", "link://h:1", "--link-secret-file", "s"),
)


def test_a_gateway_behind_a_link_has_no_reward_worker() -> None:
    with pytest.raises(BadRequest, match="--reward-worker-name needs Ray, .*`stepwell rewards`"):
        read_settings(GatewaySettings, (*GATEWAY, "--reward-worker-name", "w"), "gateway")
    assert read_settings(GatewaySettings, GATEWAY, "gateway").link == ("h", 1)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--ray-address", "link://h:1"), "needs --link-secret-file"),
        (("--link-secret-file", "s"), "belong to --ray-address link://host:port"),
        (("--ray-address", "link://h", "--link-secret-file", "s"), "--ray-address: 'link://h' names no host and port"),
        (("--ray-address", "link://h:1/x", "--link-secret-file", "s"), "names no host and port"),
    ],
)
def test_settings_of_a_link_belong_together(flags: Sequence[str], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        read_settings(DashboardSettings, flags, "dashboard")


def test_what_needs_ray_itself_says_so() -> None:
    with pytest.raises(RayUnreachable, match="link://h:1 is a link, and this command needs Ray itself"):
        join_ray("link://h:1", "default")
