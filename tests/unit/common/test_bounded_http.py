"""What a connection knows of the end of an answer, over real sockets."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import uvicorn
import uvloop
from stepwell.gateway.response_writer import handover_of, is_handed_over

from rig.waiting import until
from stepwell.common.bounded_http import HANDOVER, BoundedHttp, Handover

LARGE = b"x" * 32 * 2**20
Then = Callable[[Handover], Awaitable[None]]
Run = Callable[[Coroutine[Any, Any, Any]], Any]


on_both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
"""Gateways run on uvloop."""


@asynccontextmanager
async def connected(body: bytes, before: Then, after: Then) -> AsyncIterator[socket.socket]:
    """A client that has sent a request, and does no more by itself. The server calls `before` and `after` with what is
    known of the connection, around the last send."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        handover = handover_of(scope)
        assert handover is not None
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await before(handover)
        await send({"type": "http.response.body", "body": body, "more_body": False})
        await after(handover)

    server = uvicorn.Server(
        uvicorn.Config(app, port=0, http=BoundedHttp, lifespan="off", log_level="critical", access_log=False)
    )
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started, "the server to start")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.servers[0].sockets[0].getsockname())
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        client.setblocking(False)
        yield client
    server.should_exit = True
    await serving


async def nothing(_: Handover) -> None:
    pass


@on_both_loops
@pytest.mark.parametrize("resets", [False, True])
def test_a_client_that_has_left_is_known_before_the_event_loop_hears_of_it(run: Run, resets: bool) -> None:
    async def seen() -> tuple[bool, bool]:
        found: asyncio.Future[tuple[bool, bool]] = asyncio.get_running_loop().create_future()

        async def before(handover: Handover) -> None:
            was_open = handover.is_open()
            if resets:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            found.set_result((was_open, handover.is_open()))  # the loop has not run since

        async with connected(b"answer", before, nothing) as client, asyncio.timeout(30):
            return await found

    assert run(seen()) == (True, False)


@on_both_loops
def test_an_answer_that_its_client_takes_is_handed_over_even_if_that_takes_time(run: Run) -> None:
    async def handed() -> tuple[int | None, bool]:
        found: asyncio.Future[tuple[int | None, bool]] = asyncio.get_running_loop().create_future()

        async def after(handover: Handover) -> None:
            found.set_result((handover.unsent(), await is_handed_over(handover, 30.0)))

        async with connected(LARGE, nothing, after) as client, asyncio.timeout(60):
            while not found.done():
                await asyncio.get_running_loop().sock_recv(client, 2**20)
            return await found

    unsent, is_handed = run(handed())
    assert unsent
    assert is_handed


@on_both_loops
@pytest.mark.parametrize("leaves", [False, True])
def test_an_answer_that_its_client_does_not_take_is_not_handed_over(run: Run, leaves: bool) -> None:
    async def handed() -> bool:
        waits = asyncio.Event()
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def after(handover: Handover) -> None:
            waits.set()
            found.set_result(await is_handed_over(handover, 60.0 if leaves else 0.2))

        async with connected(LARGE, nothing, after) as client, asyncio.timeout(30):
            await waits.wait()
            if leaves:
                client.close()
            return await found

    assert not run(handed())


async def test_under_another_server_what_was_sent_counts_as_read() -> None:
    assert handover_of({"type": "http"}) is None
    known = cast("Handover", object())
    assert handover_of({"type": "http", "extensions": {HANDOVER: known}}) is known
    assert await is_handed_over(None)
