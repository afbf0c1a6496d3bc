"""Looking for actors. tests/integration/pool calls real ones."""

import asyncio
import threading
from typing import Any

import pytest
import ray

from rig.complaints import Complaints
from rig.waiting import until
from stepwell.pool.api.transport import ActorMissing
from stepwell.pool.shard.ray_transport import RayTransport


class SlowRay:
    """Knows no actor, and says so when it is allowed to."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.questions = 0

    def get_actor(self, name: str, namespace: str) -> Any:
        self.questions += 1
        assert self.may_answer.wait(30.0)
        raise ValueError(f"no actor {name} in {namespace}")


@pytest.fixture
def slow_ray(monkeypatch: pytest.MonkeyPatch) -> SlowRay:
    slow = SlowRay()
    monkeypatch.setattr(ray, "get_actor", slow.get_actor)
    return slow


async def test_callers_share_one_question_for_an_actor_that_is_missing(slow_ray: SlowRay) -> None:
    transport = RayTransport("space")
    calls = [asyncio.create_task(transport.call("shard", "plan", (), {})) for _ in range(3)]
    await until(lambda: slow_ray.questions == 1, "the question")
    slow_ray.may_answer.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(answer) for answer in answers] == [ActorMissing] * 3
    assert slow_ray.questions == 1


async def test_nothing_is_printed_of_an_actor_that_is_missing_if_nobody_waits_for_it_any_more(
    slow_ray: SlowRay,
) -> None:
    complaints = Complaints()
    transport = RayTransport("space")
    call = asyncio.create_task(transport.call("shard", "plan", (), {}))
    await until(lambda: slow_ray.questions == 1, "the question")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    slow_ray.may_answer.set()
    del call
    assert await complaints.when_all_has_ended() == []
