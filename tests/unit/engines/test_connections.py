"""Connections to engines, against a server that sends exactly these bytes."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from yarl import URL

from rig.certificates import make_certificate
from rig.waiting import until
from stepwell.engines.connections import HIGH_WATER, EngineConnections, EngineUnreached, UnreadableReply
from stepwell.errors import BadRequest

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
HANG_UP = b""
"""In place of an answer."""


@dataclass
class ScriptedHttpServer:
    answers: Sequence[bytes]
    """To the requests of each connection, one after the other. After the last one, the connection stays open."""
    sends_more: bool
    url: URL = field(default_factory=URL)
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    ended: int = 0
    sent: int = 0
    more: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    """What is sent after the first answer."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(OSError, asyncio.IncompleteReadError), closing(writer):
            for answer in self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
                self.requests.append(head + await reader.readexactly(int(length or 0)))
                if answer == HANG_UP:
                    return
                await self._write(writer, answer)
            if self.sends_more:
                while (more := await self.more.get()) != HANG_UP:
                    await self._write(writer, more)
                return
            await reader.read()
        self.ended += 1

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await writer.drain()
        self.sent += len(data)


@asynccontextmanager
async def serving(
    *answers: bytes, more: Sequence[bytes] = (), tls: ssl.SSLContext | None = None
) -> AsyncIterator[ScriptedHttpServer]:
    scripted = ScriptedHttpServer(answers, bool(more))
    for part in more:
        scripted.more.put_nowait(part)
    async with await asyncio.start_server(scripted.serve, "127.0.0.1", 0, ssl=tls) as server:
        scheme, port = "https" if tls else "http", server.sockets[0].getsockname()[1]
        scripted.url = URL(f"{scheme}://127.0.0.1:{port}/v1/chat?a=b")
        yield scripted


async def ask(connections: EngineConnections, server: ScriptedHttpServer, body: bytes | None = b"{}") -> bytes:
    return await (await connections.request(server.url, body)).read()


async def test_a_connection_is_used_again_once_its_reply_has_come() -> None:
    async with serving(WHOLE, CHUNKED + b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n", WHOLE) as server:
        with closing(EngineConnections("secret")) as connections:
            assert [await ask(connections, server) for _ in range(3)] == [b"whole", b"onetwo", b"whole"]
    assert server.connections == 1
    head = server.requests[0].split(b"\r\n")
    assert head[0] == b"POST /v1/chat?a=b HTTP/1.1"
    assert {b"Authorization: Bearer secret", b"Content-Length: 2", b"Accept-Encoding: identity"} < set(head)


async def test_a_stream_is_read_as_it_comes() -> None:
    async with serving(CHUNKED, more=[b"3\r\none\r\n"]) as server:
        with closing(EngineConnections()) as connections:
            reply = await connections.request(server.url, b"{}")
            for read, more in ((b"one", b"3\r\ntwo\r\n"), (b"two", b"0\r\n\r\n"), (b"", HANG_UP)):
                assert await reply.next_bytes() == read
                server.more.put_nowait(more)
            assert reply.is_read


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + WHOLE, b"whole"),
        (b"HTTP/1.0 200 OK\r\n\r\nto the end", b"to the end"),
    ],
)
async def test_other_ways_to_answer_are_read(answer: bytes, body: bytes) -> None:
    async with serving(answer, more=[HANG_UP]) as server:
        with closing(EngineConnections()) as connections:
            assert await ask(connections, server) == body


@pytest.mark.parametrize("answer", [WHOLE[:-1], CHUNKED + b"3\r\none\r\n"])
async def test_a_reply_that_is_cut_is_no_whole_one(answer: bytes) -> None:
    async with serving(answer, more=[HANG_UP]) as server:
        with closing(EngineConnections()) as connections:
            reply = await connections.request(server.url, b"{}")
            with pytest.raises(ConnectionResetError):
                await reply.read()


@pytest.mark.parametrize(
    "answer",
    [
        b"220 mail.example ESMTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nX: " + 2**18 * b"x",
    ],
)
async def test_what_is_no_reply_is_refused(answer: bytes) -> None:
    async with serving(answer) as server:
        with closing(EngineConnections()) as connections, pytest.raises(UnreadableReply):
            await ask(connections, server)
        await until(lambda: server.ended == 1, "the connection to be dropped")


async def test_only_a_get_is_asked_again_on_a_new_connection() -> None:
    async with serving(WHOLE, HANG_UP) as server:
        with closing(EngineConnections()) as connections:
            assert [await ask(connections, server, None) for _ in range(2)] == [b"whole"] * 2
            assert server.connections == 2
            with pytest.raises(ConnectionResetError):
                await ask(connections, server)
    assert len(server.requests) == 4


async def test_closing_a_reply_drops_its_connection_and_frees_its_place() -> None:
    async with serving(CHUNKED + b"3\r\none\r\n") as server:
        with closing(EngineConnections(limit=1)) as connections:
            for number in (1, 2):
                reply = await connections.request(server.url, b"{}")
                reply.close()
                await until(lambda number=number: server.ended == number, "the server to see it")  # type: ignore[misc]


async def test_a_call_beyond_the_limit_waits_for_a_place() -> None:
    async with serving(CHUNKED + b"3\r\none\r\n", WHOLE) as server:
        with closing(EngineConnections(limit=1)) as connections:
            first = await connections.request(server.url, b"{}")
            second = asyncio.create_task(ask(connections, server))
            await asyncio.sleep(0)
            assert (server.connections, second.done()) == (1, False)
            first.close()
            with pytest.raises(asyncio.CancelledError):
                second.cancel()
                await second
            assert (await connections.request(server.url, b"{}")).status == 200


@pytest.mark.parametrize("answer", [b"", CHUNKED])
async def test_an_engine_that_says_nothing_more_is_given_up(answer: bytes) -> None:
    async with serving(answer or b"HTTP/1.1 ") as server:
        with closing(EngineConnections(silence=0.2)) as connections, pytest.raises(TimeoutError):
            await ask(connections, server)


async def test_a_reply_that_is_not_read_is_not_received_without_bound() -> None:
    part = 2**20 * b"x"
    async with serving(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % 2**26, more=[part] * 64) as server:
        with closing(EngineConnections(silence=0.3)) as connections:
            reply = await connections.request(server.url, b"{}")
            before = -1
            while before < server.sent:  # until it stands still for longer than the bound of silence
                before = server.sent
                await asyncio.sleep(0.5)
            assert before < 2**26 - HIGH_WATER
            assert len(await reply.read()) == 2**26


async def test_an_engine_that_is_not_there_is_unreached() -> None:
    async with serving() as server:
        gone = server.url
    with closing(EngineConnections()) as connections, pytest.raises(EngineUnreached, match="Cannot connect to 127"):
        await connections.request(gone, b"{}")


async def test_an_engine_behind_tls_must_have_a_certificate_that_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = make_certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate.file, certificate.key)
    async with serving(WHOLE, tls=tls) as server:
        with closing(EngineConnections()) as connections, pytest.raises(EngineUnreached, match="self-signed"):
            await ask(connections, server)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
        with closing(EngineConnections()) as connections:
            assert await ask(connections, server, 2**22 * b" ") == b"whole"


def test_a_key_with_a_line_break_is_refused() -> None:
    with pytest.raises(BadRequest, match="no header can carry"):
        EngineConnections("key\r\nHost: other")
