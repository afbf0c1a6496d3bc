from typing import Any, cast

import pytest
from stepwell.gateway.metrics import GatewayMetrics
from stepwell.gateway.requests import CallQuotas, Message

from rig.local_pool import LocalPool
from stepwell.access.access_keys import AccessKeys
from stepwell.access.caller import ANYONE, CALLER
from stepwell.gateway.call_resolver import CallResolver
from stepwell.gateway.recording.outbox import Outbox
from stepwell.gateway.routes.trajectory_routes import FastRoutes
from stepwell.gateway.trajectory_lifecycle import TrajectoryLifecycle
from tests.unit.gateway.asgi import exchange

JSON = (b"content-type", b"application/json")


class Routed:
    """The application behind: notes what it was asked and what it could read of it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        self.bodies.append(b"")
        more = scope["type"] == "http"
        while more:
            message = await receive()
            self.bodies[-1] += message["body"]
            more = message["more_body"]


async def ask(behind: Routed, path: str, *parts: bytes, method: str = "POST") -> int:
    """The status that was answered at once; 0 where the request went on."""
    pool = LocalPool()
    resolver = CallResolver(pool)
    outbox = Outbox(pool, resolver.drop)
    keys, quotas, metrics = AccessKeys([]), CallQuotas(), GatewayMetrics()
    lifecycle = TrajectoryLifecycle(pool, outbox, resolver, keys, quotas, metrics)
    routes = FastRoutes(cast("Any", behind), lifecycle)

    async def admitted(scope: Message, receive: Any, send: Any) -> None:
        await routes({**scope, CALLER: ANYONE}, receive, send)

    sent = await exchange(admitted, method, path, [JSON], parts)
    return sent[0]["status"] if sent else 0


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/init_trajectory", b"", 200),
        ("/init_trajectory", b'{"group_size": 8}', 200),
        ("/t/p/complete_trajectory", b"", 404),
        ("/t/p/v1/complete_trajectory", b'{"reward": 1.0}', 404),
        ("/t/p/v1/v1/complete_trajectory", b'{"reward": 1.0}', 404),
    ],
)
async def test_a_sound_request_does_not_get_as_far_as_the_application(path: str, body: bytes, status: int) -> None:
    behind = Routed()
    assert await ask(behind, path, body) == status
    assert behind.bodies == []


@pytest.mark.parametrize("path", ["/init_trajectory", "/t/p/v1/complete_trajectory"])
@pytest.mark.parametrize("parts", [(b'{"unknown": 1}',), (b"{",), (b"null",), (b"{", b"}"), (b"", b"{}")])
async def test_what_it_cannot_take_goes_on_whole(path: str, parts: tuple[bytes, ...]) -> None:
    behind = Routed()
    assert await ask(behind, path, *parts) == 0
    assert behind.bodies == [b"".join(parts)]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/init_trajectory"),
        ("DELETE", "/t/p/v1/complete_trajectory"),
        ("POST", "/init_trajectory/"),
        ("POST", "/v1/p/complete_trajectory"),
        ("POST", "/t/p/v1/v1/v1/v1/complete_trajectory"),
        ("POST", "/t/p/complete_trajectory\n"),
        ("POST", "/t/p q/complete_trajectory"),
        ("POST", "/t/p/abort_trajectory"),
    ],
)
async def test_what_is_not_quite_one_of_its_calls_goes_on(method: str, path: str) -> None:
    behind = Routed()
    assert await ask(behind, path, b"{}", method=method) == 0
    assert behind.bodies == [b"{}"]
