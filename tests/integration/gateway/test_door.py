"""What is refused at the door of a gateway with keys. Requests are written byte by byte: no client would send them."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import httpx
import pytest
from stepwell.gateway.requests import LARGEST_BODY

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import HELLO, agent_of
from rig.threads import in_thread
from stepwell.common.bounded_http import LARGEST_HEADERS
from stepwell.engines import PRIVATE_FIELDS

CONTROL = "control-key-of-the-tests"
OLDER = "an-older-key-of-the-tests"
REFUSED = (400, 401, 403, 404, 405, 413)
BODY = json.dumps(HELLO).encode()


@dataclass(frozen=True)
class Reply:
    status: int
    head: str


@dataclass(frozen=True)
class Door:
    """A gateway, its engine, and two trajectories with their keys."""

    url: str
    engine: FakeEngine
    pool: LocalPool
    own: str
    """The path of the agent that asks."""
    own_key: str
    other: str
    other_key: str

    def ask(self, method: str, target: str, *headers: str, body: bytes = BODY) -> Reply:
        """`OWN` and `OTHER` in the target, and the keys' names in headers, stand for what they name."""
        host = urlsplit(self.url)
        names = {"OWN_KEY": self.own_key, "OTHER_KEY": self.other_key, "OWN": self.own, "OTHER": self.other}
        lines = [f"{method} {target} HTTP/1.1", f"Host: {host.netloc}", "Content-Type: application/json", *headers]
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
        for name, value in names.items():
            head = head.replace(name, value)
        with socket.create_connection((host.hostname, host.port), timeout=30) as sent:
            sent.sendall(head.encode("latin-1"))
            sent.sendall(body)
            got = "".join(line.decode("latin-1") for line in iter(sent.makefile("rb").readline, b"\r\n"))
        return Reply(int(got.split(" ", 2)[1]), got.lower())

    def refuse(self, method: str, target: str, *headers: str, body: bytes = BODY, status: int | None = None) -> None:
        """Refused, and seen by no one behind the door."""
        before = self.engine.request_count, self.pool.rules.stats().submitted
        got = self.ask(method, target, *headers, body=body).status
        assert got == status or (status is None and got in REFUSED), got
        assert (self.engine.request_count, self.pool.rules.stats().submitted) == before


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    pool = LocalPool()
    with ExitStack() as stack:
        engine = stack.enter_context(in_thread(FakeEngine()))
        url = stack.enter_context(in_thread(serve_gateway(pool, [engine.url], control_keys=[CONTROL])))
        http = stack.enter_context(httpx.Client(base_url=url, headers={"Authorization": f"Bearer {CONTROL}"}))
        own, other = (http.post("/init_trajectory", json={}).json() for _ in range(2))
        paths = [f"/{opened['trajectory_uid']}/{opened['prompt_uid']}" for opened in (own, other)]
        yield Door(url, engine, pool, paths[0], own["api_key"], paths[1], other["api_key"])


def test_the_agents_own_key_opens_its_own_trajectory(door: Door) -> None:
    """So that the refusals below are for their own reasons."""
    assert door.ask("GET", "OWN/v1/models", "Authorization: Bearer OWN_KEY").status == 200
    assert door.ask("GET", "OTHER/v1/models", "Authorization: Bearer OTHER_KEY").status == 200
    assert door.ask("GET", "OWN/v1/models", "X-Api-Key: OWN_KEY").status == 200, "as Anthropic's clients send it"


@pytest.mark.parametrize(
    "header",
    [
        "X-Nothing: 1",
        "Authorization:",
        "Authorization: Bearer",
        "Authorization: Bearer wrong",
        "Authorization: Bearer OTHER_KEY",
        "Authorization: Bearer OWN_KEYx",
        "Authorization: Bearer OWN_KEY, Bearer OWN_KEY",
        "Authorization: Bearer OWN_KEY\0",
        "Authorization: Basic OWN_KEY",
        "Authorization: OWN_KEY",
        "Authorization: BearerOWN_KEY",
        "Authorization: Bearer \xff\xfe\xfd",
        f"Authorization: Bearer {CONTROL[:-1]}",
        f"Authorization: Bearer {CONTROL.upper()}",
        "Authorization: Bearer not-needed",
        "Api-Key: OWN_KEY",
        "X-Api-Key: OTHER_KEY",
        "X-Api-Key: Bearer OWN_KEY",
        "Cookie: Authorization=Bearer OWN_KEY",
        "Proxy-Authorization: Bearer OWN_KEY",
    ],
)
@pytest.mark.parametrize("call", ["POST OWN/v1/chat/completions", "POST OWN/completions", "GET OWN/v1/v1/models"])
def test_without_the_right_key_an_agent_is_refused(door: Door, call: str, header: str) -> None:
    door.refuse(*call.split(), header)


def test_a_key_in_the_query_is_none(door: Door) -> None:
    door.refuse("POST", "OWN/v1/chat/completions?api_key=OWN_KEY&authorization=Bearer%20OWN_KEY", status=401)


CONTROL_CALLS = [
    "POST /init_trajectory",
    "POST /generate",
    "POST /submit_steps",
    "POST /compute_reward",
    "GET /pacing",
    "GET /engines",
    "POST /engines",
    "DELETE /engines",
    "GET /metrics",
    "GET /openapi.json",
    "GET /docs",
    "GET /v1/models",
    "GET /unrecorded/v1/models",
    "POST /v1/chat/completions",
    "POST /unrecorded/v1/chat/completions",
    *(
        f"POST OWN{below}/{call}_trajectory"
        for below in ("", "/v1", "/v1/v1")
        for call in ("register", "complete", "abort")
    ),
]


@pytest.mark.parametrize("key", ["X-Nothing: 1", "Authorization: Bearer OWN_KEY", "Authorization: Bearer wrong"])
@pytest.mark.parametrize("call", CONTROL_CALLS)
def test_what_is_for_whoever_runs_the_gateway_is_not_for_its_agents(door: Door, call: str, key: str) -> None:
    is_below_own = "OWN" in call and "OWN_KEY" in key
    door.refuse(*call.split(), key, body=b'{"reward": 1.0}', status=403 if is_below_own else 401)
    trajectory_uid, prompt_uid = door.own.strip("/").split("/")
    assert door.pool.rules.channel_if_open(trajectory_uid, prompt_uid), "the trajectory was ended"


ENGINE_ROUTES = [
    *("pause", "resume", "is_paused", "sleep", "wake_up", "collective_rpc", "update_weight_version", "weight_info"),
    *("reset_prefix_cache", "reset_mm_cache", "init_weight_transfer_engine", "start_weight_update", "update_weights"),
    *("finish_weight_update", "load_lora_adapter", "unload_lora_adapter", "tokenize", "detokenize", "invocations"),
    *("inference/v1/generate", "server_info", "version", "start_profile", "chat/completions/render"),
    *("chat/completions/derender", "embeddings", "fake/faults", "fake/state", "abort_requests"),
]


@pytest.mark.parametrize("key", ["OWN_KEY", CONTROL])
@pytest.mark.parametrize("route", ENGINE_ROUTES)
def test_no_route_of_an_engine_is_reachable_whatever_the_key(door: Door, route: str, key: str) -> None:
    for method in ("POST", "GET", "PUT"):
        for at in ("", "/v1", "/unrecorded/v1", "OWN", "OWN/v1", "OWN/v1/v1"):
            door.refuse(method, f"{at}/{route}", f"Authorization: Bearer {key}")


TRICKS = [
    "//v1/chat/completions",
    "OWN//v1/chat/completions",
    "OWN/v1//chat/completions",
    "OWN/v1/chat/completions/",
    "OWN/v1/chat/completions//",
    "OWN/v1/chat/completions/..",
    "OWN/v1/chat/completions/derender",
    "OWN/v1/chat/completions%2f..%2f..%2f..%2fpause",
    "OWN/v1/chat/../chat/completions",
    "OWN/v1/../pause",
    "OWN/v1/%2e%2e/pause",
    "OWN/v1/..%2fpause",
    "OWN/../../pause",
    "OWN%2f..%2f..%2fpause",
    "OWN/..OTHER/v1/chat/completions",
    "OWN/../..OTHER/v1/chat/completions",
    "OWN/%2e%2e/%2e%2eOTHER/v1/chat/completions",
    "OWN%2f..%2f..OTHER/v1/chat/completions",
    "OWNOTHER/v1/chat/completions",
    "/v1OWN/v1/chat/completions",
    "OWN/v1/v1/v1/v1/chat/completions",
    "OWN/V1/chat/completions",
    "OWN/v1/Chat/Completions",
    "OWN/v2/chat/completions",
    "OWN;/v1/chat/completions",
    "OWN/v1;x=1/chat/completions",
    "OWN/v1/chat/completions;/pause",
    "OWN/v1/chat/completions%00",
    "OWN%00/v1/chat/completions",
    "OWN/v1/chat/completions%0a",
    "OWN/v1/chat/completions%20",
    "OWN/v1/chat%5ccompletions",
    "OWN/v1/chat%252fcompletions",
    "OWN/v1/chat%c0%afcompletions",
    "OWN/v1/chat%ef%bc%8fcompletions",
    "OWN/v1/chat/completions%ff",
    "/%00/%00/v1/chat/completions",
    "/./../v1/chat/completions",
    "/%2e/%2e%2e/v1/chat/completions",
    "/-/_/v1/chat/completions",
    "/%c3%bc/%e2%98%95/v1/chat/completions",
    "/\xfc/\xfc/v1/chat/completions",
    f"/{'a' * 129}/p/v1/chat/completions",
    f"/{'a' * 20_000}/{'b' * 20_000}/v1/chat/completions",
    "/{trajectory_uid}/{prompt_uid}/v1/chat/completions",
    "/health/../metrics",
    "/health%2f..%2fmetrics",
    "/health/",
    "/ready/../engines",
    "/health;/metrics",
    "http://127.0.0.1/pause",
    "*",
    "OWN/v1/models?/../pause",
]
"""Each aims at something that the agent's own key does not open."""


@pytest.mark.parametrize("target", TRICKS)
def test_no_spelling_of_a_path_is_a_way_around(door: Door, target: str) -> None:
    for key in ("OWN_KEY", CONTROL):
        door.refuse("POST", target, f"Authorization: Bearer {key}")


def test_a_target_with_a_host_is_judged_by_its_path(door: Door) -> None:
    door.refuse("POST", "http://127.0.0.1OTHER/v1/chat/completions", "Authorization: Bearer OWN_KEY", status=401)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "post"])
def test_a_chat_is_posted_and_nothing_else(door: Door, method: str) -> None:
    door.refuse(method, "OWN/v1/chat/completions", "Authorization: Bearer OWN_KEY")


@pytest.mark.parametrize("target", ["OWN/v1/chat/completions", "/init_trajectory", "/health", "/nowhere"])
def test_other_sites_pages_are_allowed_nothing(door: Door, target: str) -> None:
    asked = ("Origin: https://site.example", "Access-Control-Request-Method: POST")
    for method in ("OPTIONS", "GET"):
        assert "access-control" not in door.ask(method, target, *asked, body=b"").head
    door.refuse("OPTIONS", target, *asked, body=b"")


@pytest.mark.parametrize("key", ["OWN_KEY", CONTROL])
@pytest.mark.parametrize("target", ["OWN/v1/chat/completions", "/metrics", "/pause", "/"])
def test_websockets_are_refused(door: Door, target: str, key: str) -> None:
    asked = ("Upgrade: websocket", "Sec-WebSocket-Key: c3RlcHdlbGwgdGVzdHMhIQ==", "Sec-WebSocket-Version: 13")
    reply = door.ask("GET", target, f"Authorization: Bearer {key}", *asked, "Connection: Upgrade", body=b"")
    assert reply.status != 101
    assert "upgrade: websocket" not in reply.head


def test_headers_that_are_too_large_are_refused(door: Door) -> None:
    many = [f"X-{number}: {'x' * 1000}" for number in range(LARGEST_HEADERS // 1000 + 1)]
    one = f"X-One: {'x' * LARGEST_HEADERS}"
    for headers in (many, [one]):
        door.refuse("POST", "OWN/v1/chat/completions", "Authorization: Bearer OWN_KEY", *headers, status=413)


@pytest.mark.parametrize(
    ("target", "key", "status"),
    [
        ("OWN/v1/chat/completions", "OWN_KEY", 413),
        ("/init_trajectory", CONTROL, 413),
        ("OWN/v1/chat/completions", "wrong", 401),
    ],
)
def test_a_body_that_is_too_large_is_refused(door: Door, target: str, key: str, status: int) -> None:
    body = b" " * (LARGEST_BODY + 1)
    door.refuse("POST", target, f"Authorization: Bearer {key}", body=body, status=status)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b'{"messages": "hi"}', b'"\\ud800"', b"\xff", b"[" * 100_000, b"x=1&y=2"]
)
@pytest.mark.parametrize("target", ["OWN/v1/chat/completions", "OWN/v1/completions"])
def test_a_body_that_is_no_request_is_refused(door: Door, target: str, body: bytes) -> None:
    door.refuse("POST", target, "Authorization: Bearer OWN_KEY", body=body, status=400)


@pytest.mark.parametrize("call", ["chat/completions", "completions"])
def test_of_an_agents_request_the_engine_sees_neither_dangerous_fields_nor_keys_nor_headers(
    door: Door, call: str
) -> None:
    dangerous = dict.fromkeys(PRIVATE_FIELDS, "x")
    body = json.dumps({**HELLO, "prompt": "hello", **dangerous}).encode()
    reply = door.ask("POST", f"OWN/v1/{call}", "Authorization: Bearer OWN_KEY", "X-Data-Parallel-Rank: 1", body=body)
    assert reply.status == 200
    seen = door.engine.requests[-1]
    assert seen.path == f"/v1/{call}"
    assert seen.body["max_tokens"] == HELLO["max_tokens"]
    assert not seen.body.keys() & {*PRIVATE_FIELDS, "kv_transfer_params", "vllm_xargs", "chat_template", "cache_salt"}
    assert door.own_key not in str(seen)
    assert not {"authorization", "x-data-parallel-rank", "cookie"} & {name.lower() for name in seen.headers}


async def test_a_key_works_as_long_as_the_control_key_it_was_made_with_is_listed(
    pool: LocalPool, engine: FakeEngine
) -> None:
    before = serve_gateway(pool, [engine.url], control_keys=[OLDER])
    async with before as url, agent_of(url, control_key=OLDER) as agent:
        path, key = agent.chat, agent.client.api_key
        assert await status_of(url, path, key) == 200
    async with serve_gateway(pool, [engine.url], control_keys=[CONTROL, OLDER]) as url:
        assert await status_of(url, path, key) == 200
        async with agent_of(url, control_key=OLDER) as agent:
            new_path, new_key = agent.chat, agent.client.api_key
    async with serve_gateway(pool, [engine.url], control_keys=[CONTROL]) as url:
        assert await status_of(url, path, key) == 401
        assert await status_of(url, path, OLDER) == 401
        assert await status_of(url, new_path, new_key) == 200


async def status_of(url: str, path: str, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(url) as http, http.post(path, json=HELLO, headers=headers) as answer:
        return answer.status
