"""A gateway whose calls a shard wants to know is asked, and does not ask back without a pause."""

import asyncio

import pytest

from stepwell.pool.api.calls import CallBegun
from stepwell.pool.shard.gateway_roster import GAP
from tests.rig.local_pool import LocalPool, LocalTransport
from tests.rig.waiting import until

MOST_POLLS = 20
"""Far more than one for each second that the test takes."""


class Polled(LocalTransport):
    polls = 0
    tells_held: asyncio.Event | None = None

    async def call(self, shard: str, method: str, args: object, kwargs: object) -> object:
        if method == "flush_requests":
            self.polls += 1
            if self.polls > MOST_POLLS:
                await asyncio.sleep(60)  # it would never let the test go on
        elif "TellCalls" in repr(args) and self.tells_held is not None:
            await self.tells_held.wait()
        return await super().call(shard, method, args, kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_slow", [False, True])
async def test_while_a_gateway_tells_its_calls_it_asks_no_more_often(is_slow: bool) -> None:
    pool = LocalPool(transport=Polled)
    transport: Polled = pool.transport
    told: list[bool] = []

    def held() -> list[CallBegun]:
        told.append(True)
        return []

    async def flush(trajectory_uid: str) -> None:
        raise AssertionError(trajectory_uid)

    following = asyncio.create_task(pool.follow_flushes(flush, held))
    try:
        await until(lambda: transport.polls == 1, "the gateway to ask")
        transport.tells_held = asyncio.Event() if is_slow else None
        pool.advance_to(2 * GAP)
        await until(lambda: bool(told), "the gateway to be asked for its calls")
        if transport.tells_held is not None:
            await asyncio.sleep(0.5)
            transport.tells_held.set()
        gateway = next(iter(transport.services.values())).shard.gateways
        await until(lambda: not gateway._untold, "the shard to know the calls")
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert transport.polls <= MOST_POLLS
    assert len(told) == 1
