"""Every role asks for every route of the gateway, the Atropos server and the dashboard.

Bodies are not JSON, so that a request that is let in is refused for its body, and changes nothing.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from stepwell.gateway.asgi import access_table, call_paths

from rig.dashboard import MadeUpPool, make_dashboard
from rig.issued_keys import CONTROL, IssuedKeys, bearer, issue_keys
from rig.local_pool import LocalPool
from stepwell.access.caller import Role
from stepwell.access.key_file import create_key, revoke_key
from stepwell.access.route_table import (
    ATROPOS_ROUTES,
    BELOW_A_TRAJECTORY,
    DASHBOARD_ROUTES,
    ROOTS,
    STATIC,
    TRAJECTORY_ROOT,
    Route,
    RouteTable,
)
from stepwell.atropos.app import create_atropos
from stepwell.common.tokenizers import BackgroundTokenizer, load_tokenizer
from stepwell.engines.fleet import EngineFleet
from stepwell.gateway.app import GatewayApp
from stepwell.gateway.dialects import DIALECTS

GATEWAY_ROUTES = access_table(DIALECTS)
TABLES: dict[str, RouteTable] = {
    "gateway": GATEWAY_ROUTES,
    "atropos": ATROPOS_ROUTES,
    "dashboard": DASHBOARD_ROUTES,
}
NOT_JSON = b"{"
UNKNOWN_PATHS = ("/no/such", "/no/such/route/of/tomorrow", "/admin")


def gateway(keys: IssuedKeys) -> Any:
    """Never started: what is let in fails afterwards, for want of a pool."""
    return GatewayApp(
        pool=LocalPool(),
        engines=EngineFleet([]),
        tokenizer=BackgroundTokenizer("", load_tokenizer),
        rewards=None,
        prompt_length=1,
        response_length=1,
        keys=keys.access(),
    ).asgi()


def server(name: str, keys: IssuedKeys) -> Any:
    if name == "gateway":
        return gateway(keys)
    if name == "atropos":
        return create_atropos(pool=LocalPool(), keys=keys.access(), state=None)
    return make_dashboard(MadeUpPool(4), control_keys=[CONTROL], issued=keys.file)


def json_by(key: str) -> dict[str, str]:
    return {**bearer(key), "content-type": "application/json"}


@asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
def keys(tmp_path: Path) -> IssuedKeys:
    return issue_keys(tmp_path)


def path_of(route: Route) -> str:
    names = {"{trajectory_uid}": "t", "{prompt_uid}": "p", "{rest:path}": "some/call", "{name:path}": "main.js"}
    path = route.path
    for name, value in names.items():
        path = path.replace(name, value)
    return path


def expected(route: Route, role: Role) -> bool:
    return route.is_open or role is Role.ADMIN or role in route.roles


@pytest.mark.parametrize("name", TABLES)
async def test_each_role_is_let_in_where_the_table_says_so_and_nowhere_else(name: str, keys: IssuedKeys) -> None:
    held = {**keys.by_role, Role.TRAJECTORY: keys.access().trajectory_key("t", "p")}
    wrong = []
    async with client_of(server(name, keys)) as client:
        for route in TABLES[name]:
            for role, key in held.items():
                answer = await client.request(route.method, path_of(route), headers=json_by(key), content=NOT_JSON)
                is_let_in = answer.status_code not in (401, 403)
                if is_let_in != expected(route, role):
                    wrong.append((route.method, route.path, role, answer.status_code))
                if not is_let_in and role is not Role.TRAJECTORY:
                    assert answer.status_code == 403, (route.path, role)
                    assert "admin" in answer.text, "it says who may"
    assert wrong == []


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("key", ["", "sk-swk-unknown", "expired", "revoked"])
async def test_without_a_valid_key_only_what_is_open_answers(name: str, key: str, tmp_path: Path) -> None:
    keys = issue_keys(tmp_path)
    if key == "expired":
        key, _ = create_key(keys.path, Role.ADMIN, expires="1h", now=0.0)
    elif key == "revoked":
        key, issued = create_key(keys.path, Role.ADMIN)
        revoke_key(keys.path, issued.id)
    async with client_of(server(name, keys)) as client:
        for route in TABLES[name]:
            answer = await client.request(route.method, path_of(route), headers=json_by(key), content=NOT_JSON)
            assert (answer.status_code == 401) is not route.is_open, (route.path, answer.status_code)


@pytest.mark.parametrize("name", TABLES)
async def test_what_is_not_in_the_table_is_for_the_admin(name: str, keys: IssuedKeys) -> None:
    async with client_of(server(name, keys)) as client:
        for role, key in keys.by_role.items():
            for method, path in [("GET", path) for path in UNKNOWN_PATHS] + [("PUT", "/health"), ("PATCH", "/metrics")]:
                status = (await client.request(method, path, headers=bearer(key))).status_code
                assert (status == 403) is (role is not Role.ADMIN), (role, method, path, status)


def routed(routes: Iterable[Any]) -> set[tuple[str, str]]:
    """Of FastAPI's routes, also those of included routers."""
    found: set[tuple[str, str]] = set()
    for route in routes:
        within = getattr(route, "effective_route_contexts", None)
        for one in (route,) if within is None else within():
            found |= {(method, one.path) for method in one.methods}
    return found


def listed(table: RouteTable) -> set[tuple[str, str]]:
    return {(route.method, route.path) for route in table}


def test_the_table_has_every_route_of_the_gateway_and_no_other(keys: IssuedKeys) -> None:
    """Beside FastAPI's routes, the model calls of the dialects."""
    of_app = routed(gateway(keys).app.routes)
    calls = [path for dialect in DIALECTS for path in call_paths(dialect)]
    model_calls = {
        ("POST", f"{root}{v1}/{call}")
        for root in ("", TRAJECTORY_ROOT, "/session", "/unrecorded")
        for v1 in BELOW_A_TRAJECTORY
        for call in calls
        if root or v1 in ROOTS
    }
    assert of_app | model_calls == listed(GATEWAY_ROUTES)


def test_the_table_has_every_route_of_the_atropos_server_and_no_other(keys: IssuedKeys) -> None:
    app = server("atropos", keys)
    of_server = {("GET", path) for path in app._server_routes}
    assert set(app._channel_routes) | of_server == listed(ATROPOS_ROUTES)


def test_the_table_has_every_route_of_the_dashboard_and_no_other(keys: IssuedKeys) -> None:
    assert routed(server("dashboard", keys).routes) == listed(DASHBOARD_ROUTES)
    assert ("GET", STATIC) in listed(DASHBOARD_ROUTES)


async def test_a_channel_of_the_atropos_server_is_for_the_keys_of_that_channel(tmp_path: Path) -> None:
    keys = issue_keys(tmp_path)
    scoped, _ = create_key(keys.path, Role.TRAINER, channels=["math"], projects=["search"])
    async with client_of(server("atropos", keys)) as client:
        for path, status in (
            ("/channel/math/status", 200),
            ("/channel/search.train/status", 200),
            ("/channel/searching/status", 403),
            ("/status", 403),
            ("/channel/train/status", 403),
            ("/batch", 403),
            ("/metrics", 403),
            ("/channel/math/health", 403),
        ):
            assert (await client.get(path, headers=bearer(scoped))).status_code == status, path


def test_the_dashboard_has_no_way_in_for_a_key_of_one_channel() -> None:
    assert not [route for route in DASHBOARD_ROUTES if route.is_for_scoped]
