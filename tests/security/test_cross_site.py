"""What a page of another site makes a browser send to a server on this machine changes nothing, and reads nothing."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from rig.atropos.server import TRAINER, join, scored_group, serve_atropos, start_training
from rig.dashboard import MadeUpPool, serve_dashboard
from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from stepwell.access.access_keys import AccessKeys
from stepwell.atropos.app import AtroposRoutes, create_atropos
from stepwell.atropos.registry import AtroposMetrics, Registries
from stepwell.wire.scored_groups import group_from_json
from stepwell.wire.scored_groups_arrow import MEDIA_TYPE, groups_to_arrow

KEY = "control-key-of-the-tests"
BEARER = {"Authorization": f"Bearer {KEY}"}
SERVERS = ("gateway", "atropos", "dashboard")
CURATION = {"action": "reject", "by": "x", "trajectories": [{"trajectory_uid": "r1-0", "prompt_uid": "r1"}]}
JSON = {"Content-Type": "application/json"}
ELSEWHERE = (
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "http://localhost"},
    {"Origin": ""},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
)
"""What a browser says of a request that a page of another origin makes; ports of one machine are other origins."""
FOREIGN_TYPES = (
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data",
    None,
)
"""A page may send these to any server without asking it first; a Blob has none."""


@dataclass(frozen=True)
class Target:
    """A server, a request that changes something there, and how a test sees that."""

    name: str
    client: httpx.AsyncClient
    path: str
    body: Mapping[str, Any]
    changes: Callable[[], object]

    @property
    def host(self) -> str:
        return self.client.base_url.netloc.decode()

    async def post(self, headers: Mapping[str, str]) -> httpx.Response:
        content = httpx.Request("POST", "http://x", json=self.body).content
        return await self.client.post(self.path, content=content, headers=dict(headers))

    def says(self, answer: httpx.Response) -> str:
        """The text of an error, in the form of that server."""
        body = answer.json()
        return str(body["detail"] if self.name == "atropos" else body["error"]["message"])


@asynccontextmanager
async def serve(name: str, control_keys: tuple[str, ...] = ()) -> AsyncIterator[Target]:
    pool, watched = LocalPool(), MadeUpPool(trajectories=8)
    made: tuple[str, Mapping[str, Any], Callable[[], object]]
    async with AsyncExitStack() as stack:
        if name == "gateway":
            engine = await stack.enter_async_context(FakeEngine())
            url = await stack.enter_async_context(serve_gateway(pool, [engine.url], control_keys=control_keys))
            made = ("/init_trajectory", {"group_size": 2}, lambda: pool.rules.stats().channels)
        elif name == "atropos":
            url = await stack.enter_async_context(serve_atropos(pool, control_keys=control_keys))
            made = ("/scored_data", scored_group(), lambda: list(pool.transport.messages))
        else:
            url = await stack.enter_async_context(serve_dashboard(watched, control_keys=control_keys))
            made = ("/api/curate", CURATION, lambda: watched.calls["curate"])
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        yield Target(name, client, *made)


@pytest.fixture(params=SERVERS)
async def target(request: pytest.FixtureRequest) -> AsyncIterator[Target]:
    """Without keys, on loopback."""
    async with serve(request.param) as target:
        yield target


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8100", "127.0.0.1.evil.example", "10.0.0.7", "local host", ""]
)
async def test_a_name_that_another_site_can_have_is_not_served(target: Target, host: str) -> None:
    """DNS rebinding: the name of a page's site begins to point to this machine."""
    before = target.changes()
    for answer in (
        await target.post({**JSON, "Host": host}),
        await target.client.get("/metrics", headers={"Host": host}),
    ):
        assert answer.status_code == 421
        assert "--allowed-hosts" in target.says(answer)
    assert target.changes() == before


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9", "127.0.0.1", "127.0.0.2:80", "[::1]:8100", "localhost."])
async def test_loopback_is_served_under_its_names(target: Target, host: str) -> None:
    assert (await target.client.get("/health", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize("name", SERVERS)
async def test_a_request_with_a_key_may_use_any_name(name: str) -> None:
    """A page of another site has no key, whatever its name points to."""
    async with serve(name, (KEY,)) as target:
        before = target.changes()
        assert (await target.post({**JSON, "Host": "stepwell.example"})).status_code == 401
        assert target.changes() == before
        assert (await target.post({**JSON, **BEARER, "Host": "stepwell.example"})).status_code == 200
        assert target.changes() != before


@pytest.mark.parametrize("where", ELSEWHERE, ids=str)
async def test_a_request_of_another_site_changes_nothing(target: Target, where: Mapping[str, str]) -> None:
    before = target.changes()
    answer = await target.post({**JSON, **where})
    assert answer.status_code == 403
    assert "another site" in target.says(answer)
    assert target.changes() == before


@pytest.mark.parametrize("name", SERVERS)
async def test_a_key_does_not_help_a_request_of_another_site(name: str) -> None:
    """A browser adds a password that it has kept by itself."""
    async with serve(name, (KEY,)) as target:
        answer = await target.client.post(
            target.path, json=target.body, auth=("", KEY), headers={"Origin": "https://evil.example"}
        )
        assert answer.status_code == 403


async def test_a_page_of_the_same_origin_and_programs_are_served(target: Target) -> None:
    own = {"Origin": f"http://{target.host}", "Sec-Fetch-Site": "same-origin"}
    before = target.changes()
    assert (await target.post({**JSON, **own})).status_code == 200
    assert target.changes() != before
    assert (await target.client.post(target.path, json=target.body)).status_code == 200


async def test_a_proxy_that_ends_tls_changes_the_scheme_only(target: Target) -> None:
    assert (await target.post({**JSON, "Origin": f"https://{target.host}"})).status_code == 200


@pytest.mark.parametrize("kind", FOREIGN_TYPES)
async def test_a_body_of_a_type_that_a_page_can_send_anywhere_is_refused(target: Target, kind: str | None) -> None:
    before = target.changes()
    answer = await target.post({"Content-Type": kind} if kind else {})
    assert answer.status_code == 415
    assert "Content-Type: application/json" in target.says(answer)
    assert target.changes() == before


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
async def test_json_is_read_however_its_type_is_spelled(target: Target, kind: str) -> None:
    assert (await target.post({"Content-Type": kind})).status_code == 200


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", None])
async def test_without_a_body_there_is_no_type_to_check(kind: str | None) -> None:
    async with serve("gateway") as target:
        answer = await target.client.post("/init_trajectory", headers={"Content-Type": kind} if kind else {})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/session/v1/messages", {"type", "error", "request_id"}),
        ("/session/v1/chat/completions", {"error"}),
        ("/t/p/v1/responses", {"error"}),
    ],
)
async def test_a_refusal_has_the_form_of_the_dialect(path: str, form: set[str]) -> None:
    async with serve("gateway") as target:
        for headers, status in (({"Content-Type": "text/plain"}, 415), ({**JSON, "Origin": "null"}, 403)):
            answer = await target.client.post(path, content=b"{}", headers=headers)
            assert (answer.status_code, set(answer.json())) == (status, form)


async def test_the_atropos_server_below_a_gateway_checks_too() -> None:
    pool = LocalPool()
    atropos = create_atropos(pool=pool, keys=AccessKeys(()), state=None)
    async with (
        FakeEngine() as engine,
        serve_gateway(pool, [engine.url], atropos=atropos) as url,
        httpx.AsyncClient(base_url=f"{url}/atropos") as client,
    ):
        refused = [
            await client.get("/status", headers={"Host": "evil.example"}),
            await client.post("/register", json=TRAINER, headers={"Origin": "null"}),
            await client.post("/register", content=b"{}", headers={"Content-Type": "text/plain"}),
            await client.get("/reset_data", headers={"Sec-Fetch-Site": "cross-site"}),
        ]
        assert [answer.status_code for answer in refused] == [421, 403, 415, 403]
        assert (await client.post("/register", json=TRAINER)).status_code == 200


async def test_arrow_is_a_type_of_the_atropos_server() -> None:
    async with serve("atropos") as target:
        body = groups_to_arrow([group_from_json(scored_group())])
        answer = await target.client.post("/scored_data", content=body, headers={"Content-Type": MEDIA_TYPE})
        assert answer.json() == {"status": "received"}


# -- GET ---------------------------------------------------------------------------------------------------------------

ATROPOS_GETS_THAT_CHANGE = {
    "/batch": "hands out a batch",
    "/reset_data": "drops the data; POST does the same",
    "/status-env": "notes that the environment is alive",
}
"""As Atropos defines them: its environments and trainers call them so."""


async def test_no_get_of_the_gateway_changes_anything(engine: FakeEngine, pool: LocalPool) -> None:
    async with serve_gateway(pool, [engine.url]) as url, httpx.AsyncClient(base_url=url) as client:
        opened = (await client.post("/init_trajectory", json={})).json()
        names = {name: opened[name] for name in ("trajectory_uid", "prompt_uid")}
        paths = (await client.get("/openapi.json")).json()["paths"]
        gets = sorted(path.format(**names) for path, operations in paths.items() if "get" in operations)
        posts = sorted(path.format(**names) for path, operations in paths.items() if "get" not in operations)
        assert len(gets) >= 7
        before, asked = pool.rules.stats(), engine.request_count
        statuses = {path: (await client.get(path)).status_code for path in gets}
        assert set(statuses.values()) == {200}, statuses
        refused = {path: (await client.get(path)).status_code for path in posts}
        assert set(refused.values()) <= {404, 405}, refused
        assert (pool.rules.stats(), engine.request_count) == (before, asked)


async def test_no_get_of_the_dashboard_changes_anything() -> None:
    pool = MadeUpPool(trajectories=8)
    gets = ("status?fresh=true", "series", "trajectories", "group?prompt_uid=r1", "audit", "curate")
    async with serve_dashboard(pool) as url, httpx.AsyncClient(base_url=url) as client:
        statuses = [(await client.get(f"/api/{path}")).status_code for path in gets]
    assert statuses[-1] in (404, 405)
    assert pool.calls["curate"] == 0


async def test_gets_of_the_atropos_server_that_change_something_are_the_known_ones(pool: LocalPool) -> None:
    registries = Registries(None, 0.0)
    routes = AtroposRoutes(pool, registries, AtroposMetrics(registries.steps, dict)).routes
    gets = {path for method, path in routes if method == "GET"}
    assert gets == {"/wandb_info", "/info", "/status", "/latest_example", *ATROPOS_GETS_THAT_CHANGE}
    async with serve_atropos(pool) as url, httpx.AsyncClient(base_url=url) as client:
        await start_training(client)
        await join(client)
        await client.post("/scored_data", json=scored_group(size=4))
        before = pool.rules.stats()
        for path in sorted(gets - ATROPOS_GETS_THAT_CHANGE.keys()):
            assert (await client.get(path)).status_code == 200
        assert pool.rules.stats() == before


@pytest.mark.parametrize("path", ATROPOS_GETS_THAT_CHANGE)
@pytest.mark.parametrize("where", [{"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}], ids=str)
async def test_such_a_get_of_another_site_is_refused(pool: LocalPool, path: str, where: Mapping[str, str]) -> None:
    """An image or a link is enough to make a browser send a GET."""
    async with serve_atropos(pool) as url, httpx.AsyncClient(base_url=url) as client:
        await start_training(client)
        env_id = await join(client)
        await client.post("/scored_data", json=scored_group(size=4))
        for below in ("", "/channel/train"):
            answer = await client.request("GET", below + path, json={"env_id": env_id}, headers=where)
            assert answer.status_code == 403
        assert len((await client.get("/batch")).json()["batch"]) == 1


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_data_is_reset_by_a_post_and_by_the_get_of_atroposlib(pool: LocalPool, method: str) -> None:
    async with serve_atropos(pool) as url, httpx.AsyncClient(base_url=url) as client:
        await start_training(client)
        await client.post("/scored_data", json=scored_group(size=4))
        answer = await client.request(method, "/reset_data")
        assert (answer.status_code, answer.text) == (200, "Reset successful")
        assert (await client.get("/info")).json()["batch_size"] == -1
