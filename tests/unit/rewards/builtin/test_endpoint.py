"""A model server that fails: asked again, or reported."""

import pytest

from rig.fake_engine import FakeEngine
from rig.fake_engine.faults import Faults
from stepwell.common.async_calls import Backoff
from stepwell.errors import RewardFailed
from stepwell.rewards.builtin.judge import ATTEMPTS, Endpoint
from stepwell.steps.step import JsonObject

BODY: JsonObject = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


async def post(engine: FakeEngine, timeout: float = 10.0) -> JsonObject:
    endpoint = Endpoint(f"{engine.url}/v1", timeout=timeout, concurrency=4, backoff=Backoff(first=0.01, longest=30.0))
    async with endpoint.session() as session:
        return await endpoint.post(session, "/chat/completions", BODY)


@pytest.mark.parametrize("fault", [Faults(error_status=429), Faults(error_status=503), Faults(hang_up=True)])
async def test_a_server_that_is_busy_is_asked_again(fault: Faults) -> None:
    async with FakeEngine() as engine:
        engine.faults = Faults(error_status=fault.error_status, hang_up=fault.hang_up, times=3)
        assert "choices" in await post(engine)
        assert engine.request_count == 4


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Faults(error_status=503), "answered 503"),
        (Faults(hang_up=True), "ServerDisconnected"),
        (Faults(delay_s=5), "did not answer within 0.1 s"),
    ],
)
async def test_a_server_that_stays_broken_is_an_error_after_some_attempts(fault: Faults, said: str) -> None:
    async with FakeEngine() as engine:
        engine.faults = fault
        with pytest.raises(RewardFailed, match=said):
            await post(engine, timeout=0.1 if fault.delay_s else 10)
        assert engine.request_count == ATTEMPTS


@pytest.mark.parametrize(
    ("fault", "said"),
    [(Faults(malformed="not_json"), "not with a JSON object"), (Faults(error_status=400), "answered 400")],
)
async def test_an_answer_that_would_not_change_is_an_error_at_once(fault: Faults, said: str) -> None:
    async with FakeEngine() as engine:
        engine.faults = fault
        with pytest.raises(RewardFailed, match=said):
            await post(engine)
        assert engine.request_count == 1
