"""S3: after its completion, an agent's calls are refused by a real gateway, with the trajectory's own key."""

import time
from typing import Any

import aiohttp

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool

HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


async def post(http: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    async with http.post(path, json=body) as answer:
        return answer.status, await answer.json()


async def test_calls_after_the_completion_are_refused_and_change_nothing(engine: FakeEngine) -> None:
    pool = LocalPool(clock=time.time)
    async with (
        serve_gateway(pool, [engine.url]) as one,
        serve_gateway(pool, [engine.url]) as other,
        aiohttp.ClientSession(one) as http,
        aiohttp.ClientSession(other) as elsewhere,
    ):
        _, opened = await post(http, "/init_trajectory", {})
        path = f"/{opened['trajectory_uid']}/{opened['prompt_uid']}/v1"
        assert (await post(http, f"{path}/chat/completions", HELLO))[0] == 200
        assert (await post(http, f"{path}/complete_trajectory", {"reward": 0.75}))[0] == 200
        for session in (http, elsewhere):
            status, answer = await post(session, f"{path}/chat/completions", HELLO)
            assert status == 404
            assert "no open trajectory" in answer["error"]["message"]
    (step,) = pool.taken()
    assert (step.reward, step.is_last, step.trajectory_return) == (0.75, True, 0.75)
