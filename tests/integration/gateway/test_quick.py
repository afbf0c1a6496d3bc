"""Init and complete take a shorter way than FastAPI's; a body that comes in pieces takes FastAPI's. Both must agree."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool

JSON = "application/json"
OPENINGS = (
    b"",
    b"null",
    b"{}",
    b"[]",
    b"{",
    b'"x"',
    b'{"trajectory_uid": "given", "prompt_uid": "too"}',
    b'{"trajectory_uid": "a/b"}',
    b'{"trajectory_uid": "\\ud800"}',
    b'{"trajectory_uid": "\xff"}',
    b'{"channel": "", "group_size": 0}',
    b'{"channel": "validate", "group_size": 4, "metadata": {"deep": [1, {"x": null}]}}',
    b'{"group_size": "4"}',
    b'{"group_size": 4.0}',
    b'{"group_size": 4.5}',
    b'{"group_size": true}',
    b'{"group_size": 123456789012345678901234567890}',
    b'{"metadata": {"x": NaN}}',
    b'{"metadata": ' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"grup_size": 4}',
)
ENDINGS = (
    b"",
    b"null",
    b"{}",
    b"{",
    b'{"reward": 1}',
    b'{"reward": "0.5"}',
    b'{"reward": NaN}',
    b'{"reward": 1e999}',
    b'{"reward": true}',
    b'{"reward": null, "channel": "validate"}',
    b'{"reward": "good", "channel": 1}',
    b'{"rewrad": 1}',
)
KINDS = (JSON, "APPLICATION/JSON; charset=utf-8")


@pytest.fixture
async def http(engine: FakeEngine) -> AsyncIterator[aiohttp.ClientSession]:
    async with serve_gateway(LocalPool(), [engine.url]) as url, aiohttp.ClientSession(url) as session:
        yield session


async def ask(
    http: aiohttp.ClientSession, path: str, body: bytes, kind: str, *, in_pieces: bool
) -> tuple[int, str, object]:
    async def pieces() -> AsyncIterator[bytes]:
        yield body[:1]
        await asyncio.sleep(0.01)  # so that it comes as a message of its own
        yield body[1:]

    data = pieces() if in_pieces else body
    async with http.post(path, data=data, headers={"Content-Type": kind}) as answer:
        return answer.status, answer.content_type, await answer.json()


def names_left_out(answer: object) -> object:
    """An answer without what is made up for each trajectory."""
    assert isinstance(answer, dict)
    return {name: value for name, value in answer.items() if name not in ("trajectory_uid", "prompt_uid", "base_url")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", OPENINGS)
async def test_an_opening_is_answered_alike_both_ways(http: aiohttp.ClientSession, body: bytes, kind: str) -> None:
    quick = await ask(http, "/init_trajectory", body, kind, in_pieces=False)
    routed = await ask(http, "/init_trajectory", body, kind, in_pieces=True)
    assert quick[:2] == routed[:2]
    assert names_left_out(quick[2]) == names_left_out(routed[2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", ENDINGS)
async def test_an_ending_is_answered_alike_both_ways(http: aiohttp.ClientSession, body: bytes, kind: str) -> None:
    answers = []
    for uid, in_pieces in (("one", False), ("two", True)):
        opening = b'{"trajectory_uid": "%b", "prompt_uid": "p"}' % uid.encode()
        await ask(http, "/init_trajectory", opening, JSON, in_pieces=False)
        answers.append(await ask(http, f"/{uid}/p/v1/complete_trajectory", body, kind, in_pieces=in_pieces))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["/init_trajectory", "/t/p/v1/complete_trajectory"])
async def test_only_a_post_opens_or_ends(http: aiohttp.ClientSession, path: str, method: str) -> None:
    async with http.request(method, path) as answer:
        assert answer.status in (404, 405)
    async with http.get("/pacing") as answer:
        assert (await answer.json())["in_flight"] == 0


@pytest.mark.parametrize("sent", [b"", b'{"trajectory_uid": '])
async def test_a_client_that_leaves_within_its_request_has_asked_for_nothing(
    http: aiohttp.ClientSession, sent: bytes
) -> None:
    url = http._base_url
    assert url is not None
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"POST /init_trajectory HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30\r\n\r\n" + sent)
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await ask(http, "/init_trajectory", b"{}", JSON, in_pieces=False)  # by now the gateway has seen the other's end
    async with http.get("/pacing") as answer:
        assert (await answer.json())["in_flight"] == 1
