import json
from typing import Any, cast

import pytest
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from stepwell.gateway.asgi import AccessCheck, GatewayAsgi, access_table, call_paths
from stepwell.gateway.calls import NO_TRAJECTORY, RequestedCall
from stepwell.gateway.requests import LARGEST_BODY, Headers, Message, Receive, Send

from stepwell.access.access_keys import AccessKeys
from stepwell.access.caller import Caller
from stepwell.access.route_table import BELOW_A_TRAJECTORY, RouteGuard
from stepwell.common.bounded_http import LARGEST_HEADERS
from stepwell.gateway.agent_calls import AgentCalls
from stepwell.gateway.dialects import DIALECTS
from stepwell.gateway.dialects.dialect import Dialect
from stepwell.pool.api.producing import TrajectoryRef
from tests.unit.gateway.asgi import exchange

CONTROL = "control-key-of-the-test"
JSON = (b"content-type", b"application/json")
AGENT = (b"authorization", f"Bearer {AccessKeys([CONTROL]).trajectory_key('t', 'p')}".encode())


class Behind:
    """What stands behind the front: notes which part was reached, and reads the body."""

    def __init__(self) -> None:
        self.served: list[tuple[TrajectoryRef, Dialect]] = []
        self.whitebox: list[bool] = []
        self.routed: list[str] = []
        self.read = b""

    async def serve(
        self,
        scope: Message,
        receive: Receive,
        send: Send,
        requested: RequestedCall,
        caller: Caller,
    ) -> None:
        self.served.append((requested.ref, requested.dialect))
        self.whitebox.append(requested.is_whitebox)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.routed.append(scope.get("path", scope["type"]))
        if scope["type"] == "http":
            while True:
                message = await receive()
                self.read += message["body"]
                if not message["more_body"]:
                    return


def make_front(behind: Behind, keys: tuple[str, ...], largest_body: int = LARGEST_BODY) -> GatewayAsgi:
    access = AccessCheck(RouteGuard(AccessKeys(keys)), access_table(DIALECTS))
    calls = cast("AgentCalls", behind)
    return GatewayAsgi(cast("FastAPI", behind), calls, access, DIALECTS, largest_body=largest_body)


async def ask(
    behind: Behind,
    path: str,
    *,
    method: str = "POST",
    headers: Headers | None = None,
    keys: tuple[str, ...] = (),
    parts: tuple[bytes, ...] = (b"",),
    largest_body: int = LARGEST_BODY,
) -> tuple[int, Any]:
    """The front's own answer: status and error; (0, None) where it passed the request on."""
    front = make_front(behind, keys, largest_body)
    sent = await exchange(front, method, path, headers or [], parts)
    return (sent[0]["status"], json.loads(sent[1]["body"])["error"]) if sent else (0, None)


@pytest.mark.parametrize("below", BELOW_A_TRAJECTORY)
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
async def test_an_agents_call_is_found_however_its_base_url_ends(below: str, dialect: Dialect) -> None:
    behind = Behind()
    await ask(behind, f"/t-1.a~:@/p_2{below}/{dialect.paths[0]}")
    assert behind.served == [(TrajectoryRef("t-1.a~:@", "p_2"), dialect)]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/v1/v1/chat/completions",
        "/session/v1/v1/v1/v1/chat/completions",
        "/unrecorded/p/chat/completions",
        "/t/chat/completions/",
        "/t/p/v1/v1/v1/v1/chat/completions",
        "/t/p/chat/completions/",
        "//t/p/chat/completions",
        "/t/p//chat/completions",
        "/t/../p/chat/completions",
        "/../p/chat/completions",
        "/t/p/chat/completions\n",
        "/t;x/p/chat/completions",
        "/t/p q/chat/completions",
        f"/{'t' * 129}/p/chat/completions",
        "/t/p/v1/chat/completions/render",
        "/t/p/pause",
        "/pause",
    ],
)
async def test_whatever_is_not_quite_an_agents_call_is_none(path: str) -> None:
    behind = Behind()
    await ask(behind, path)
    assert (behind.served, behind.routed) == ([], [path])


@pytest.mark.parametrize("root", ["/v1", "/v1/v1", "/session", "/session/v1", "/session/v1/v1"])
async def test_a_model_call_at_the_root_is_in_a_session_of_its_caller(root: str) -> None:
    behind = Behind()
    await ask(behind, f"{root}/completions")
    assert (behind.served, behind.whitebox) == ([(NO_TRAJECTORY, DIALECTS[1])], [False])


@pytest.mark.parametrize("below", BELOW_A_TRAJECTORY)
async def test_a_model_call_below_unrecorded_is_in_no_session(below: str) -> None:
    behind = Behind()
    await ask(behind, f"/unrecorded{below}/completions")
    assert (behind.served, behind.whitebox) == ([(NO_TRAJECTORY, DIALECTS[1])], [True])


@pytest.mark.parametrize("keys", [(), (CONTROL,)])
@pytest.mark.parametrize(
    ("method", "path"),
    [*(("POST", f"/{path}") for dialect in DIALECTS for path in call_paths(dialect)), ("GET", "/models")],
)
async def test_a_call_without_v1_is_told_the_right_address_before_its_key_is_asked_for(
    method: str, path: str, keys: tuple[str, ...]
) -> None:
    behind = Behind()
    status, error = await ask(behind, path, method=method, keys=keys, headers=[(b"host", b"localhost:8100")])
    assert (status, behind.served, behind.routed) == (404, [], [])
    assert error["message"].endswith("the base_url of this gateway is http://localhost:8100/v1")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "HEAD"])
async def test_only_a_post_is_an_agents_call(method: str) -> None:
    behind = Behind()
    await ask(behind, "/t/p/chat/completions", method=method)
    assert (behind.served, behind.routed) == ([], ["/t/p/chat/completions"])


async def test_without_its_key_nothing_of_a_request_is_looked_at() -> None:
    behind = Behind()
    for path in ("/t/p/chat/completions", "/init_trajectory", "/nowhere"):
        status, error = await ask(behind, path, keys=(CONTROL,), parts=())
        assert (status, error["code"]) == (401, "forbidden")
    assert (behind.served, behind.routed) == ([], [])


@pytest.mark.parametrize("path", ["/t/p/v1/messages", "/t/p/v1/chat/completions"])
async def test_the_bare_key_may_come_in_the_header_of_a_dialect(path: str) -> None:
    behind, own = Behind(), AGENT[1].removeprefix(b"Bearer ")
    assert await ask(behind, path, headers=[(b"x-api-key", own)], keys=(CONTROL,)) == (0, None)
    both = [(b"authorization", b"Bearer of another server"), (b"x-api-key", own)]
    assert await ask(behind, path, headers=both, keys=(CONTROL,)) == (0, None)
    assert len(behind.served) == 2
    for headers in ([(b"x-api-key", b"wrong")], [(b"x-other-key", own)], [(b"authorization", own)]):
        assert (await ask(behind, path, headers=headers, keys=(CONTROL,)))[0] == 401
    assert len(behind.served) == 2


async def test_a_trajectorys_key_opens_its_own_calls_only() -> None:
    behind = Behind()
    assert await ask(behind, "/t/p/chat/completions", headers=[AGENT], keys=(CONTROL,)) == (0, None)
    for path, refused in (
        ("/u/p/chat/completions", 401),
        ("/t/q/chat/completions", 401),
        ("/t/p/complete_trajectory", 403),
        ("/u/p/complete_trajectory", 401),
        ("/metrics", 401),
    ):
        status, _ = await ask(behind, path, headers=[AGENT], keys=(CONTROL,))
        assert status == refused, path
    assert len(behind.served) == 1
    assert behind.routed == []


async def test_headers_are_bounded_before_a_key_is_compared() -> None:
    large = (b"x-large", b"x" * LARGEST_HEADERS)
    status, error = await ask(Behind(), "/t/p/chat/completions", headers=[large], keys=(CONTROL,))
    assert (status, error["code"]) == (413, "too_large")
    assert await ask(Behind(), "/health", headers=[(b"x", b"x" * (LARGEST_HEADERS - 1))]) == (0, None)


async def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    for path in ("/t/p/chat/completions", "/init_trajectory"):
        behind = Behind()
        status, error = await ask(behind, path, headers=[JSON, (b"content-length", b"11")], parts=(), largest_body=10)
        assert (status, error["code"]) == (413, "too_large")
        assert (behind.served, behind.routed) == ([], [])


async def test_a_body_that_grows_too_large_is_not_read_to_its_end() -> None:
    behind = Behind()
    await ask(behind, "/init_trajectory", parts=(b"12345", b"67890"), largest_body=10)
    assert behind.read == b"1234567890"
    with pytest.raises(HTTPException, match="413"):
        await ask(Behind(), "/init_trajectory", parts=(b"12345", b"67890", b"1", b"2"), largest_body=10)


async def test_what_is_no_http_is_the_apps_own() -> None:
    behind = Behind()
    front = make_front(behind, (CONTROL,))

    async def nothing(*_: object) -> Any:
        raise AssertionError("nothing is read or sent here")

    for kind in ("lifespan", "websocket"):
        await front({"type": kind}, nothing, nothing)
    assert behind.routed == ["lifespan", "websocket"]
