import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable

import pytest

from stepwell.common.child import FramedChild

PATIENT = 60.0
ECHO = """
import socket, sys
from stepwell.common.child import framed, read_frame_from

channel = socket.socket(fileno=0)
stream = channel.makefile("rb")
while (message := read_frame_from(stream)) is not None:
    if message == b"end":
        sys.exit(3)
    channel.sendall(framed(message[::-1]))
"""


@pytest.fixture
async def child() -> AsyncIterator[FramedChild]:
    echo = await FramedChild.start((sys.executable, "-c", ECHO))
    yield echo
    await echo.close()


async def answer(child: FramedChild) -> bytes:
    async with asyncio.timeout(PATIENT):
        return await child.receive()


async def test_messages_are_answered_in_order_whatever_their_bytes(child: FramedChild) -> None:
    sent = [b"", b"\0\n", bytes(range(256)) * 1_000]
    await child.send(*sent)

    assert [await answer(child) for _ in sent] == [message[::-1] for message in sent]


async def test_a_child_that_ends_in_its_grace_period_is_not_killed(child: FramedChild) -> None:
    await child.send(b"end")

    assert await child.end(PATIENT) == 3
    assert await child.end(PATIENT) == 3


async def test_a_child_that_does_not_end_is_killed(child: FramedChild) -> None:
    await child.send(b"hello")
    await answer(child)

    assert await child.end(0.01) == -signal.SIGKILL


@pytest.mark.parametrize("stop", [lambda child: child.kill(), lambda child: None], ids=["killed", "closed"])
async def test_the_end_of_a_child_is_awaited(child: FramedChild, stop: Callable[[FramedChild], None]) -> None:
    stop(child)
    await child.close()

    assert await child.wait() == -signal.SIGKILL
    with pytest.raises((EOFError, OSError)):
        await answer(child)


async def test_a_program_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError, match="no/such"):
        await FramedChild.start(("no/such/program",))
