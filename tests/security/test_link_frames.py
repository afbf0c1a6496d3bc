"""Whoever can write to a link's socket can call the pool. No code of it runs in the link process."""

import asyncio
import os
import pickle
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from stepwell.pool.slices.producing import ChannelIfOpen

from stepwell.common.message_codec import CLASS, MOST_PACKED, SEPARATOR, pack_message
from stepwell.common.message_format import FORMAT
from stepwell.errors import BadRequest, IncompatibleMessage, TooLarge
from stepwell.pool.api.transport import ActorFailed
from stepwell.pool.client.link_messages import (
    HEADER,
    SIZE,
    LinkAnswer,
    LinkCall,
    LinkState,
    frame,
    open_stream,
    read_frame,
)
from stepwell.pool.client.link_process import LinkServer

WAIT = 60.0


class Touch:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


class Echo:
    """In place of Ray: every call is answered with its arguments."""

    connections = 1

    async def call(self, actor: str, method: str, args: Any, kwargs: Any) -> Any:
        return [*args]


class Linked:
    """A link process's server with its unix socket, in this process and without Ray."""

    def __init__(self, path: str, parent: socket.socket) -> None:
        self.path = path
        self.parent = parent
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self.path)
        self.writers.append(writer)
        return reader, writer

    async def ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *pieces: bytes | memoryview
    ) -> LinkAnswer:
        writer.writelines(pieces)
        async with asyncio.timeout(WAIT):
            while True:
                number, packed = await read_frame(reader)
                if number:
                    answer: LinkAnswer = packed.unpack()
                    return answer

    async def is_closed(self, *pieces: bytes | memoryview) -> bool:
        """Whether the link closes a new connection over which this comes."""
        reader, writer = await self.connect()
        writer.writelines(pieces)
        try:
            async with asyncio.timeout(WAIT):
                while await reader.read(2**16):
                    pass
        except (ConnectionError, TimeoutError) as failure:
            return isinstance(failure, ConnectionError)
        finally:
            writer.close()
        return True


@pytest.fixture
async def linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Linked]:
    path = str(tmp_path / "link")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()
    ours, theirs = socket.socketpair()
    server = LinkServer("127.0.0.1:1", "default")
    monkeypatch.setattr(server, "_transport", Echo())
    running = asyncio.create_task(server.run(theirs, listener))
    linked = Linked(path, ours)
    yield linked
    ours.close()
    for writer in (*linked.writers, *server._writers):
        writer.close()
    await asyncio.wait([running], timeout=WAIT)  # as all have left
    assert server._server is not None
    server._server.close()
    await server._server.wait_closed()
    await asyncio.get_running_loop().shutdown_default_executor()


def framed(*parts: bytes, number: int = 1) -> bytes:
    sizes = b"".join(SIZE.pack(len(part)) for part in parts)
    body = sizes + b"".join(parts)
    return HEADER.pack(number, len(body), len(parts)) + body


def call_of(name: str, **fields: Any) -> bytes:
    """A call whose argument is an object of this class."""
    link_call = msgpack.ExtType(CLASS, SEPARATOR.join(("LinkCall", str(FORMAT), *LinkCall._fields)).encode())
    argument = [msgpack.ExtType(CLASS, SEPARATOR.join((name, str(FORMAT), *fields)).encode()), *fields.values()]
    return framed(msgpack.packb([link_call, "data_pool", "answer", [argument], {}]))


async def test_no_pickle_is_loaded_wherever_it_stands(linked: Linked, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    raw = pickle.dumps(Touch(touched), protocol=5)
    calls = (raw, pickle.dumps(LinkCall("data_pool", "stats", [Touch(touched)], {}), protocol=5))
    for sent in (*calls, *(framed(call) for call in calls), *(framed(call, b"") for call in calls)):
        if len(sent) >= HEADER.size:
            assert await linked.is_closed(sent)
    reader, writer = await linked.connect()
    assert (await linked.ask(reader, writer, *frame(1, LinkCall("a", "m", [raw], {})))).value == [raw]
    assert not touched.exists()


async def test_a_malformed_frame_closes_its_own_connection_only(linked: Linked) -> None:
    other, writer = await linked.connect()
    bombs = (
        b"\xdd\xff\xff\xff\xff" * 500,
        b"\xdd\x00\x0f\x00\x00" * 900 + bytes(2**20),
        b"\x91" * 9000,
        b"\x81\xa1x" * 9000,
    )
    sizes = (
        HEADER.pack(1, 2**62, 1),
        HEADER.pack(1, 100, 2**40),
        HEADER.pack(1, 0, 0),
        HEADER.pack(1, 8, 1) + SIZE.pack(2**63),
    )
    objects = pack_message(LinkCall("a", "m", [np.zeros(3)], {}))[0]
    malformed = [
        *(framed(bomb) for bomb in bombs),
        *sizes,
        framed(bytes(objects), bytes(23)),
        framed(bytes(objects)),
        b"".join(frame(1, LinkState(is_joined=True))),
        framed(msgpack.packb("no call")),
    ]
    for sent in malformed:
        assert await linked.is_closed(sent), sent[:40]
        answer = await linked.ask(other, writer, *frame(7, LinkCall("a", "m", [ChannelIfOpen("t", "p")], {})))
        assert answer.value == [ChannelIfOpen("t", "p")]


async def test_a_frame_that_is_cut_off_ends_nothing_else(linked: Linked) -> None:
    whole = b"".join(frame(1, LinkCall("a", "m", [np.arange(1000)], {})))
    for size in (1, HEADER.size, HEADER.size + 3, len(whole) - 1):
        _, writer = await linked.connect()
        writer.write(whole[:size])
        writer.write_eof()
        writer.close()
    reader, writer = await linked.connect()
    assert (await linked.ask(reader, writer, whole)).failure is None


async def test_classes_and_values_that_do_not_fit_are_refused_and_the_connection_goes_on(linked: Linked) -> None:
    reader, writer = await linked.connect()
    refused = (
        call_of("Popen", args="touch x"),
        call_of("os.system", command="touch x"),
        call_of("ChannelIfOpen", trajectory_uid=1, prompt_uid="p"),
        call_of("ChannelIfOpen", trajectory_uid=["t"], prompt_uid="p"),
        call_of("PoolPlan", limits={"max_queue_size": "many"}),
        call_of("Columns", uids=["a"]),
    )
    for sent in refused:
        assert isinstance((await linked.ask(reader, writer, sent)).failure, IncompatibleMessage)
    for method in ("__ray_terminate__", "__ray_call__", "_actor_id", "__reduce__"):
        answer = await linked.ask(reader, writer, *frame(1, LinkCall("data_pool", method, [], {})))
        assert isinstance(answer.failure, BadRequest)
    answer = await linked.ask(reader, writer, *frame(1, LinkCall("data_pool", "__ray_ready__", [1], {})))
    assert answer == LinkAnswer([1])


async def test_what_the_link_cannot_send_is_a_failure_of_that_call(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def call(self: Echo, actor: str, method: str, args: Any, kwargs: Any) -> Any:
        return np.array([{}], object) if method == "objects" else 1 / 0

    monkeypatch.setattr(Echo, "call", call)
    reader, writer = await linked.connect()
    for method, text in (("objects", "TypeError: arrays of object cannot travel"), ("fails", "ZeroDivisionError: ")):
        failure = (await linked.ask(reader, writer, *frame(1, LinkCall("a", method, [], {})))).failure
        assert isinstance(failure, ActorFailed)
        assert failure.reason.startswith(text)


async def test_the_parents_connection_is_read_in_the_same_way(linked: Linked, tmp_path: Path) -> None:
    reader, writer = await open_stream(linked.parent)
    touched = tmp_path / "touched"
    writer.write(framed(pickle.dumps(Touch(touched), protocol=5)))
    async with asyncio.timeout(WAIT):
        while await reader.read(2**16):
            pass
    assert not touched.exists()
    writer.close()


def test_what_the_other_side_would_not_read_is_not_sent() -> None:
    with pytest.raises(TooLarge, match="more than a link carries"):
        frame(1, LinkCall("a", "m", [bytes(MOST_PACKED)], {}))


def test_no_module_of_the_wire_loads_pickles() -> None:
    package = Path(__file__).parents[2] / "src" / "stepwell"
    for module in ("common/message_codec.py", "pool/client/link_messages.py", "pool/client/link.py"):
        assert "import pickle" not in (package / module).read_text()
