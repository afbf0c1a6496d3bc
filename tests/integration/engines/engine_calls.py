"""Calls to engines as the gateway makes them, for the tests of the engine fleet."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rig.fake_engine import FakeEngine
from stepwell.engines.fleet import EngineFleet
from stepwell.wire.openai import Upstream

CHAT = Upstream.CHAT
ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
LONG = ASKED | {"max_tokens": 500, "ignore_eos": True}
LONG_STREAM = LONG | {"stream": True}


@asynccontextmanager
async def watched(*fakes: FakeEngine, **options: Any) -> AsyncIterator[EngineFleet]:
    """The engines of those servers, watched."""
    async with EngineFleet([fake.url for fake in fakes], **options) as engines:
        watch = asyncio.create_task(engines.watch())
        yield engines
        watch.cancel()


async def call(engines: EngineFleet, sticky: str = "") -> tuple[int, str]:
    """One chat: the status, and the address of the engine that answered."""
    reply = await engines.send(CHAT, ASKED, sticky=sticky)
    await reply.read()
    return reply.status, reply.engine.address


async def addresses(engines: EngineFleet, count: int) -> list[str]:
    return [(await call(engines))[1] for _ in range(count)]


def states(engines: EngineFleet) -> list[str]:
    return [str(view.state) for view in engines.replicas]


def generations(fake: FakeEngine) -> int:
    return fake.asked[CHAT.value]
