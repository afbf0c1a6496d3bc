"""The Python client, against a real gateway process."""

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from openai import AsyncOpenAI, AuthenticationError, OpenAI

import stepwell
from rig.fake_engine import FakeEngine
from rig.gateways import free_port, serve_gateway
from rig.local_pool import LocalPool
from rig.threads import in_thread
from stepwell.errors import BadRequest, Conflict, Forbidden, GatewayUnreachable, NotReady, UnknownTrajectory


class Connected:
    """The client's run, and the pool behind its gateway."""

    def __init__(self, url: str, pool: LocalPool) -> None:
        self.url = url
        self.pool = pool
        self.run = stepwell.connect(url)


@asynccontextmanager
async def serving(pool: LocalPool, control_keys: Sequence[str] = ()) -> AsyncIterator[str]:
    async with FakeEngine() as engine, serve_gateway(pool, [engine.url], control_keys=control_keys) as url:
        yield url


@pytest.fixture
def gateway() -> Iterator[Connected]:
    pool = LocalPool()
    with in_thread(serving(pool)) as url:
        yield Connected(url, pool)


def ask(t: stepwell.TrajectoryContext) -> None:
    with OpenAI(base_url=t.base_url, api_key=t.api_key) as client:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])


def test_leaving_the_block_completes_the_trajectory_with_its_reward(gateway: Connected) -> None:
    with gateway.run.trajectory(prompt_uid="p", channel="validation", metadata={"level": 2}) as t:
        ask(t)
        ask(t)
        t.reward = 0.5
    assert t.status == "completed"
    steps = gateway.pool.taken("validation")
    assert [(step.prompt_uid, step.step_index, step.reward) for step in steps] == [("p", 0, None), ("p", 1, 0.5)]
    assert steps[0].trajectory_uid == t.trajectory_uid
    assert steps[0].metadata == {"level": 2}


def test_a_trajectory_left_without_a_reward_is_unscored_not_zero(gateway: Connected) -> None:
    with gateway.run.trajectory() as t:
        ask(t)
    assert [step.reward for step in gateway.pool.taken()] == [None]


def test_an_exception_aborts_the_trajectory_and_goes_on(gateway: Connected) -> None:
    with pytest.raises(ZeroDivisionError), gateway.run.trajectory() as t:
        ask(t)
        raise ZeroDivisionError
    assert t.status == "aborted"
    assert gateway.pool.rules.stats().channels["train"].dropped["aborted"].steps == 1


def test_a_trajectory_without_a_call_says_that_it_was_empty(gateway: Connected) -> None:
    with gateway.run.trajectory() as t:
        pass
    assert t.status == "empty"


async def test_the_block_works_asynchronously_too(gateway: Connected) -> None:
    async with gateway.run.trajectory() as t, AsyncOpenAI(base_url=t.base_url, api_key=t.api_key) as client:
        await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
        t.reward = 1.0
    assert [step.reward for step in gateway.pool.taken()] == [1.0]


async def test_an_exception_aborts_asynchronously_too(gateway: Connected) -> None:
    with pytest.raises(ZeroDivisionError):
        async with gateway.run.trajectory() as t:
            raise ZeroDivisionError
    assert t.status == "aborted"


def test_a_refusal_is_raised_as_the_error_it_is(gateway: Connected) -> None:
    with gateway.run.trajectory(prompt_uid="p", group_size=2):
        with (
            pytest.raises(Conflict, match="one of 2 trajectories, not 3"),
            gateway.run.trajectory(prompt_uid="p", group_size=3),
        ):
            pass
        with (
            pytest.raises(BadRequest, match="prompt_uid: use at most 128 letters, digits and . _"),
            gateway.run.trajectory(prompt_uid="a b"),
        ):
            pass


def test_a_reward_that_is_not_a_number_is_refused_here(gateway: Connected) -> None:
    with pytest.raises(BadRequest, match="nan"), gateway.run.trajectory() as t:
        t.reward = float("nan")


def test_a_failing_abort_does_not_hide_the_agents_own_failure(gateway: Connected) -> None:
    with pytest.raises(ZeroDivisionError) as info, gateway.run.trajectory() as t:
        t.base_url = t.base_url.replace(t.trajectory_uid, "somebody-else")
        raise ZeroDivisionError
    assert "could not be aborted either: no trajectory somebody-else" in info.value.__notes__[0]
    with pytest.raises(UnknownTrajectory), gateway.run.trajectory() as t:
        t.base_url = t.base_url.replace(t.trajectory_uid, "somebody-else")


def test_connecting_to_nothing_says_so() -> None:
    with pytest.raises(NotReady, match=r"not ready after 0.1 s: no gateway answers at http://127.0.0.1:\d+/ready"):
        stepwell.connect(f"http://127.0.0.1:{free_port()}", timeout=0.1)


def test_connecting_to_a_gateway_that_lacks_something_names_it(gateway: Connected) -> None:
    gateway.pool.away = True
    with pytest.raises(NotReady, match="data_pool: the pool is away"):
        stepwell.connect(gateway.url, timeout=0.1)


def test_something_that_is_no_gateway_is_recognised() -> None:
    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_request(self, code: object = "-", size: object = "-") -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(GatewayUnreachable, match="answers 404"), stepwell.Run(url).trajectory():
            pass
        server.shutdown()


def test_a_gateway_with_keys_gives_each_agent_one_for_its_own_trajectory() -> None:
    key = "a control key of the test's".replace(" ", "-")
    with in_thread(serving(LocalPool(), [key])) as url:
        run = stepwell.connect(url, key=key)
        with run.trajectory() as one, run.trajectory() as other:
            ask(one)
            with pytest.raises(AuthenticationError), OpenAI(base_url=one.base_url, api_key=other.api_key) as client:
                client.models.list()
        assert one.status == "completed"
        with pytest.raises(Forbidden, match="or a control key"), stepwell.connect(url).trajectory():
            pass
