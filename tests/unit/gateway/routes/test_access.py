import pytest

from stepwell.common.access_keys import AccessKeys
from stepwell.gateway.dialects import DIALECTS
from stepwell.gateway.routes.access import REFUSALS, Access, AccessCheck, access_table

ACCESS = access_table(DIALECTS)
CONTROL = "control-key-of-the-tests"


def missing(keys: AccessKeys, path: str, authorization: bytes | None) -> Access | None:
    return AccessCheck(keys, ACCESS).missing(path, authorization)


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


@pytest.fixture
def keys() -> AccessKeys:
    return AccessKeys([CONTROL])


@pytest.mark.parametrize("prefix", ["", "/v1", "/v1/v1"])
def test_an_agent_may_talk_to_the_model_but_not_steer_its_trajectory(keys: AccessKeys, prefix: str) -> None:
    own = bearer(keys.trajectory_key("t", "p"))
    for call in ("chat/completions", "completions", "models"):
        assert missing(keys, f"/t/p{prefix}/{call}", own) is None
        assert missing(keys, f"/t/p{prefix}/{call}", bearer(CONTROL)) is None
        assert missing(keys, f"/t/p{prefix}/{call}", None) is Access.TRAJECTORY
        assert missing(keys, f"/t/other{prefix}/{call}", own) is Access.TRAJECTORY
        assert missing(keys, f"/other/p{prefix}/{call}", own) is Access.TRAJECTORY
    for call in ("register_trajectory", "complete_trajectory", "abort_trajectory"):
        assert missing(keys, f"/t/p{prefix}/{call}", own) is Access.CONTROL
        assert missing(keys, f"/t/p{prefix}/{call}", bearer(CONTROL)) is None


PATHS = [path for path in ACCESS if "{" not in path]


@pytest.mark.parametrize("path", PATHS)
def test_what_no_trajectory_is_named_in_needs_a_key_of_its_own_except_the_probes(keys: AccessKeys, path: str) -> None:
    opens_sessions = path.startswith("/session/") or path == "/init_trajectory"
    needed = None if path in ("/health", "/ready") else Access.SESSION if opens_sessions else Access.CONTROL
    assert missing(keys, path, bearer(keys.trajectory_key("t", "p"))) is needed
    assert missing(keys, path, bearer(CONTROL)) is None
    assert missing(AccessKeys([]), path, None) is None


@pytest.mark.parametrize(
    "path",
    [
        *(
            "",
            "/",
            "//",
            "///",
            "/a/route/of/tomorrow",
            "/tomorrow",
            "health",
            "/health/",
            "//health",
            "/health/../pacing",
        ),
        *("/t/p", "/t/p/", "/t/p/v1", "/t/p/v2/models", "/t/p/models/", "/t/p//models", "/t/p/v1/v1/v1/models"),
        *("/t/p/v1/chat/completions/", "/t/p/../metrics", "/t/p/pause", "/t/p/v1/collective_rpc", "/x/t/p/v1/models"),
        *("/t/p/v1/chat/completions/render", "/v1/chat", "/{trajectory_uid}/{prompt_uid}/pacing", "/T/P/V1/MODELS"),
    ],
)
def test_a_path_that_is_not_in_the_table_needs_the_control_key(keys: AccessKeys, path: str) -> None:
    assert missing(keys, path, bearer(keys.trajectory_key("t", "p"))) is Access.CONTROL
    assert missing(keys, path, None) is Access.CONTROL


def test_a_path_spelt_like_the_table_is_no_way_around_it(keys: AccessKeys) -> None:
    path = "/{trajectory_uid}/{prompt_uid}/v1/models"
    assert missing(keys, path, bearer(keys.trajectory_key("t", "p"))) is Access.TRAJECTORY


def test_a_key_may_come_in_the_header_of_anthropics_clients(keys: AccessKeys) -> None:
    own, check = keys.trajectory_key("t", "p").encode(), AccessCheck(keys, ACCESS)
    assert check.missing("/t/p/v1/messages", None, own) is None
    assert check.missing("/t/p/v1/messages", b"Bearer of another server", own) is None
    assert check.missing("/t/p/v1/messages/count_tokens", None, own) is None
    assert check.missing("/t/other/v1/messages", None, own) is Access.TRAJECTORY
    assert check.missing("/t/p/v1/messages", None, b"wrong") is Access.TRAJECTORY
    assert check.missing("/pacing", None, own) is Access.CONTROL


def test_every_refusal_says_how_to_send_which_key() -> None:
    assert set(REFUSALS) == set(Access) - {Access.OPEN}
    assert all("Authorization: Bearer KEY" in text for text in REFUSALS.values())
