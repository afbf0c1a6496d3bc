"""A user who was forgotten is answered, and not recorded: neither in the running session nor in a new one."""

import aiohttp

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.waiting import until
from stepwell.pool.api.sessions import SESSION
from tests.integration.gateway.test_session_keys import ANN, BOB, CONTROL, asks, chat, steps_arrive
from tests.integration.gateway.test_sessions import live_pool, trajectories


async def test_calls_of_a_forgotten_user_are_answered_and_leave_nothing(engine: FakeEngine) -> None:
    pool = live_pool(None)
    async with serve_gateway(pool, [engine.url], control_keys=[CONTROL]) as url:
        said, _ = await chat(url, ANN, [asks("hello")])
        _, bobs = await chat(url, BOB, [asks("hello")])
        await steps_arrive(pool, [1, 1])
        (removed,) = (await pool.forget("ann"))["shards"].values()
        assert removed["gateways"], "the gateway has cleaned its spool, if it has one"
        _, running = await chat(url, ANN, [*said, asks("and now?")])
        _, new = await chat(url, ANN, [asks("another conversation")])
        assert all((running, new)), "they look like everybody's"
        assert (await chat(url, BOB, [asks("I am recorded")]))[1]
        await until(lambda: len(trajectories(pool)) == 2, "Bob's second session")
    assert {found.metadata[SESSION]["user"] for found in trajectories(pool)} == {"bob"}
    assert bobs in pool.rules.state.trajectories
    assert not {running, new} & pool.rules.state.trajectories.keys()


async def test_an_operator_forgets_a_user_over_http(engine: FakeEngine) -> None:
    pool = live_pool(None)
    async with serve_gateway(pool, [engine.url], control_keys=[CONTROL]) as url, aiohttp.ClientSession(url) as http:
        _, session = await chat(url, ANN, [asks("hello")])
        await steps_arrive(pool, [1])
        for key, status in ((ANN, 403), (CONTROL, 200)):
            headers = {"Authorization": f"Bearer {key}"}
            async with http.post("/forget", json={"subject": "ann"}, headers=headers) as answer:
                assert answer.status == status
                receipt = await answer.json()
    (shard,) = receipt["shards"].values()
    assert [found["where"] for found in shard["trajectories"].values()] == ["queue"]
    assert session not in str(receipt)
    assert trajectories(pool) == []


async def test_a_session_that_is_opened_for_a_forgotten_user_is_not_recorded(engine: FakeEngine) -> None:
    pool = live_pool(None)
    await pool.forget("ann")
    async with serve_gateway(pool, [engine.url]) as url, aiohttp.ClientSession(url) as http:
        async with http.post("/init_trajectory", json={"session": True, "user": "ann"}) as answer:
            opened = await answer.json()
            assert answer.status == 200, opened
        path = f"/{opened['trajectory_uid']}/{opened['prompt_uid']}/v1/chat/completions"
        async with http.post(path, json={"model": "tiny", "messages": [asks("hello")]}) as answer:
            assert answer.status == 200
        async with http.post("/init_trajectory", json={"metadata": {"subject": "ann"}}) as answer:
            assert answer.status == 410
    assert trajectories(pool) == []
