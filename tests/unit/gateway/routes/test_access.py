from dataclasses import replace
from pathlib import Path

import pytest
from stepwell.gateway.asgi import AccessCheck, access_table

from stepwell.access.access_keys import AccessKeys
from stepwell.access.caller import AGENT, Role
from stepwell.access.key_file import KeyFile, create_key
from stepwell.access.route_table import BELOW_A_TRAJECTORY, RouteGuard
from stepwell.errors import Forbidden, NotPermitted
from stepwell.gateway.dialects import DIALECTS

ACCESS = access_table(DIALECTS)
CONTROL = "control-key-of-the-tests"


def role_of(keys: AccessKeys, call: str, *headers: bytes | None) -> Role:
    """The role by which a call is let in."""
    method, _, path = call.partition(" ")
    check = AccessCheck(RouteGuard(keys), ACCESS)
    return check.admit({"method": method, "path": path}, path, [header or b"" for header in headers])[1].role


def refused(keys: AccessKeys, call: str, *headers: bytes | None) -> str:
    """Why a call without a valid key is not let in."""
    with pytest.raises(Forbidden) as failure:
        role_of(keys, call, *headers)
    return str(failure.value)


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


@pytest.fixture
def keys() -> AccessKeys:
    return AccessKeys([CONTROL])


CALLS = ("POST {}/chat/completions", "POST {}/completions", "GET {}/models")


@pytest.mark.parametrize("prefix", BELOW_A_TRAJECTORY)
def test_an_agent_may_talk_to_the_model_but_not_steer_its_trajectory(keys: AccessKeys, prefix: str) -> None:
    own = bearer(keys.trajectory_key("t", "p"))
    for call in CALLS:
        assert role_of(keys, call.format(f"/t/p{prefix}"), own) is Role.TRAJECTORY
        assert role_of(keys, call.format(f"/t/p{prefix}"), bearer(CONTROL)) is Role.ADMIN
        assert "key of the trajectory" in refused(keys, call.format(f"/t/p{prefix}"), None)
        assert "key of the trajectory" in refused(keys, call.format(f"/t/other{prefix}"), own)
        assert "key of the trajectory" in refused(keys, call.format(f"/other/p{prefix}"), own)
    for call in ("register_trajectory", "complete_trajectory", "abort_trajectory", "feedback"):
        with pytest.raises(NotPermitted, match="the role trajectory; this is for (runner|reward) and admin"):
            role_of(keys, f"POST /t/p{prefix}/{call}", own)
        refused(keys, f"POST /other/p{prefix}/{call}", own)
        assert role_of(keys, f"POST /t/p{prefix}/{call}", bearer(CONTROL)) is Role.ADMIN


@pytest.mark.parametrize("route", [route for route in ACCESS if "{" not in route.path], ids=lambda it: it.path)
def test_what_no_trajectory_is_named_in_needs_a_key_of_its_own_except_the_probes(
    keys: AccessKeys, route: object
) -> None:
    call = f"{route.method} {route.path}"  # type: ignore[attr-defined]
    own = bearer(keys.trajectory_key("t", "p"))
    if call in ("GET /health", "GET /ready"):
        role_of(keys, call, own)
    else:
        assert "Authorization: Bearer KEY" in refused(keys, call, own)
    assert role_of(keys, call, bearer(CONTROL)) is Role.ADMIN
    assert role_of(AccessKeys([]), call, None) is Role.ADMIN


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "//", "///", "/a/route/of/tomorrow", "/tomorrow", "health", "/health/", "//health"),
        *("/health/../pacing", "/docs"),
        *("/t/p", "/t/p/", "/t/p/v1", "/t/p/v2/models", "/t/p/models/", "/t/p//models", "/t/p/v1/v1/v1/v1/models"),
        *("/t/p/v1/chat/completions/", "/t/p/../metrics", "/t/p/pause", "/t/p/v1/collective_rpc", "/x/t/p/v1/models"),
        *("/t/p/v1/chat/completions/render", "/v1/chat", "/{trajectory_uid}/{prompt_uid}/pacing", "/T/P/V1/MODELS"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_a_path_that_is_not_in_the_table_is_for_the_admin(keys: AccessKeys, path: str, method: str) -> None:
    with pytest.raises((Forbidden, NotPermitted), match=r"needs a control key|this is for admin$"):
        role_of(keys, f"{method} {path}", bearer(keys.trajectory_key("t", "p")))
    assert "needs a control key" in refused(keys, f"{method} {path}", None)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "HEAD", "GET"])
def test_a_method_that_is_not_in_the_table_is_for_the_admin(keys: AccessKeys, method: str) -> None:
    with pytest.raises(NotPermitted, match="this is for admin$"):
        role_of(keys, f"{method} /t/p/v1/chat/completions", bearer(keys.trajectory_key("t", "p")))


def test_a_path_spelt_like_the_table_is_no_way_around_it(keys: AccessKeys) -> None:
    refused(keys, "GET /{trajectory_uid}/{prompt_uid}/v1/models", bearer(keys.trajectory_key("t", "p")))


def test_a_key_may_come_beside_another_one(keys: AccessKeys) -> None:
    own = bearer(keys.trajectory_key("t", "p"))
    for call in ("POST /t/p/v1/messages", "POST /t/p/v1/messages/count_tokens"):
        assert role_of(keys, call, None, own) is Role.TRAJECTORY
        assert role_of(keys, call, b"Bearer of another server", own) is Role.TRAJECTORY
    refused(keys, "POST /t/other/v1/messages", None, own)
    refused(keys, "POST /t/p/v1/messages", None, bearer("wrong"))
    refused(keys, "GET /pacing", None, own)


def test_an_agents_call_is_let_in_before_the_key_file_is_asked(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.find = file.find_id = None  # type: ignore[assignment, method-assign]
    keys = AccessKeys([CONTROL], file)
    check = AccessCheck(RouteGuard(keys), ACCESS)
    scope = {"method": "POST", "path": "/t/p/v1/chat/completions"}
    assert check.admit(scope, scope["path"], [bearer(keys.trajectory_key("t", "p"))])[1] is AGENT


def test_the_key_of_a_trajectory_is_void_with_the_key_that_opened_it(tmp_path: Path) -> None:
    path, now = tmp_path / "keys.json", [0.0]
    _, issued = create_key(path, Role.RUNNER, expires="1h", now=0.0)
    keys = AccessKeys([CONTROL], KeyFile(path, clock=lambda: now[0], interval=0.0))
    own = bearer(keys.trajectory_key("t", "p", issued.caller()))
    assert role_of(keys, "POST /t/p/v1/chat/completions", own) is Role.TRAJECTORY
    refused(keys, "POST /t/other/v1/chat/completions", own)
    forged = bearer(keys.trajectory_key("t", "p", replace(issued.caller(), id="runner-00000000")))
    refused(keys, "POST /t/p/v1/chat/completions", forged)
    now[0] = 3600.0
    refused(keys, "POST /t/p/v1/chat/completions", own)
