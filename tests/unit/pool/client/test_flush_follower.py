"""A gateway whose calls a shard wants to know is asked, and does not ask back without a pause."""

import asyncio

import pytest

from rig.local_pool import LocalPool, LocalTransport
from rig.waiting import until
from stepwell.pool.api.producing import HeldCalls

MOST_POLLS = 20
"""Far more than one for each second that the test takes."""


class Polled(LocalTransport):
    polls = 0
    tells = 0
    tells_held: asyncio.Event | None = None

    async def call(self, shard: str, method: str, args: object, kwargs: object) -> object:
        if "TakeRequests" in repr(args) or "ShowItself" in repr(args):
            self.polls += 1
            if self.polls > MOST_POLLS:
                await asyncio.sleep(60)  # it would never let the test go on
        if "TellCalls" in repr(args):
            self.tells += 1
            if self.tells_held is not None:
                await self.tells_held.wait()
        return await super().call(shard, method, args, kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_slow", [False, True])
async def test_while_a_gateway_tells_its_calls_it_asks_no_more_often(is_slow: bool) -> None:
    pool = LocalPool(transport=Polled)
    transport: Polled = pool.transport

    def held() -> HeldCalls:
        return HeldCalls(missed=1)

    async def flush(trajectory_uid: str) -> None:
        raise AssertionError(trajectory_uid)

    transport.tells_held = asyncio.Event() if is_slow else None
    following = asyncio.create_task(pool.follow_flushes(flush, held))
    gateways = transport.services[pool.plan.name].shard.gateways
    try:
        await until(lambda: transport.tells == 1, "the gateway to tell its calls", 20.0)
        if transport.tells_held is not None:
            await asyncio.sleep(2.0)
            transport.tells_held.set()
        await until(lambda: not gateways._untold, "the shard to know the calls", 20.0)
        polls = transport.polls
        assert polls <= MOST_POLLS
        gateways.watch()
        await until(lambda: transport.polls > polls, "the gateway to come again", 20.0)
        assert not gateways._untold, "it has told them"
        assert transport.tells == 1
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
