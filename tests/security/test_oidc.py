"""People log in at an OIDC provider, and nobody else does. It is real HTTP with real signatures, and can lie."""

import json
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from stepwell.common.imports import install_command

from rig.dashboard import MadeUpPool, make_dashboard, serve_dashboard
from rig.issued_keys import CONTROL, bearer
from rig.oidc_provider import ABSENT, CLIENT_ID, CLIENT_SECRET, OidcProvider, serve_provider
from stepwell.access.access_keys import AccessKeys
from stepwell.access.audit_log import AuditLog
from stepwell.commands.dashboard import DashboardSettings, login_of
from stepwell.commands.sections import read_settings
from stepwell.dashboard.login import SESSION_SECONDS, ListedPeople, OidcClient, OidcLogin
from stepwell.errors import BadRequest
from tests.security.test_cross_site import ELSEWHERE, FOREIGN_TYPES

ANN = {"email": "Ann@example.org", "email_verified": True}
BOB = {"email": "bob@example.org", "email_verified": True}
VIEWERS, CURATORS = ("bob@example.org", "group:lookers"), ("ann@Example.org", "group:deciders")
SESSION = "stepwell-session"
ATTEMPT = "stepwell-login"
JSON = {"Content-Type": "application/json"}


@dataclass
class Clock:
    ahead: float = 0.0

    def __call__(self) -> float:
        return 1_800_000_000.0 + self.ahead


@dataclass
class Dashboard:
    """One that people log in at, and a browser."""

    browser: httpx.AsyncClient
    pool: MadeUpPool
    clock: Clock = field(default_factory=Clock)

    async def callback(self) -> str:
        """Goes to the provider; returns where it sends the browser back to."""
        begun = await self.browser.get("/login")
        assert begun.status_code == 302, begun.text
        async with httpx.AsyncClient(verify=False, timeout=60) as elsewhere:
            return str((await elsewhere.get(begun.headers["location"])).headers["location"])

    async def log_in(self) -> httpx.Response:
        return await self.browser.get(await self.callback())

    async def me(self) -> Any:
        answer = await self.browser.get("/api/me")
        return answer.json() if answer.status_code == 200 else answer.status_code

    async def curate(self, headers: Mapping[str, str] = {}) -> httpx.Response:
        row = next(iter(self.pool.rows.values()))
        named = [{"trajectory_uid": row.trajectory_uid, "prompt_uid": row.prompt_uid}]
        body = json.dumps({"action": "mark", "mark": "odd", "by": "somebody else", "trajectories": named})
        return await self.browser.post("/api/curate", content=body, headers=dict(headers))


def login_at(provider: OidcProvider, *, control: Sequence[str] = (CONTROL,), **how: Any) -> OidcLogin:
    people = ListedPeople(how.pop("viewers", VIEWERS), how.pop("curators", CURATORS))
    client = OidcClient(provider.url, how.pop("client_id", CLIENT_ID), CLIENT_SECRET)
    return OidcLogin(client, people, AccessKeys(control), **how)


@asynccontextmanager
async def dashboard_at(provider: OidcProvider, **how: Any) -> AsyncIterator[Dashboard]:
    """Without a server of its own: the provider has one, and the dashboard asks it over HTTP."""
    pool, clock = MadeUpPool(8), Clock()
    app = make_dashboard(pool, login=login_at(provider, clock=clock, **how), control_keys=[CONTROL])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8200") as browser:
        yield Dashboard(browser, pool, clock)


@pytest.fixture(scope="module")
def served_provider() -> Iterator[OidcProvider]:
    with serve_provider() as provider:
        yield provider


@pytest.fixture
def provider(served_provider: OidcProvider) -> OidcProvider:
    """An honest one, at which Ann logs in."""
    vars(served_provider).update(vars(OidcProvider(served_provider.url, person=dict(ANN))))
    return served_provider


@pytest.fixture
async def dashboard(provider: OidcProvider) -> AsyncIterator[Dashboard]:
    async with dashboard_at(provider) as dashboard:
        yield dashboard


async def test_a_curator_decides_under_their_own_name(provider: OidcProvider, tmp_path: Path) -> None:
    audit, pool = AuditLog(tmp_path / "audit.jsonl"), MadeUpPool(8)
    async with (
        serve_dashboard(pool, login=login_at(provider), control_keys=[CONTROL], audit=audit) as url,
        httpx.AsyncClient(base_url=url, timeout=60, headers={"Connection": "close"}) as browser,
    ):
        dashboard = Dashboard(browser, pool)
        assert await dashboard.me() == 401
        answer = await dashboard.log_in()
        assert (answer.status_code, answer.headers["location"]) == (303, "../")
        assert await dashboard.me() == {"id": "oidc ann@example.org", "role": "curator"}
        assert (await dashboard.browser.get("/api/status")).status_code == 200
        decided = await dashboard.curate(JSON)
        assert decided.status_code == 200, decided.text
        assert [entry.by for entry in dashboard.pool.entries] == ["oidc ann@example.org"]
    audit.close()
    (line,) = map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines())
    assert (line["key"], line["role"], line["call"]) == ("oidc ann@example.org", "curator", "POST /api/curate")


async def test_a_viewer_looks_and_does_not_decide(provider: OidcProvider, dashboard: Dashboard) -> None:
    provider.person = BOB
    await dashboard.log_in()
    assert await dashboard.me() == {"id": "oidc bob@example.org", "role": "viewer"}
    refused = await dashboard.curate(JSON)
    assert refused.status_code == 403
    assert "oidc bob@example.org has the role viewer; this is for curator and admin" in refused.text
    assert dashboard.pool.entries == []


@pytest.mark.parametrize(
    ("person", "me"),
    [
        ({"groups": ["x", "deciders"]}, {"id": "oidc id-of-them", "role": "curator"}),
        ({"groups": ["lookers"]}, {"id": "oidc id-of-them", "role": "viewer"}),
        ({"groups": ["deciders"], **BOB}, {"id": "oidc bob@example.org", "role": "curator"}),
        ({"groups": ["lookers"], "preferred_username": "ann@example.org"}, {"id": "oidc id-of-them", "role": "viewer"}),
    ],
)
async def test_a_group_lets_people_in_under_a_name_that_they_did_not_choose(
    provider: OidcProvider, dashboard: Dashboard, person: dict[str, Any], me: dict[str, str]
) -> None:
    provider.person = person
    await dashboard.log_in()
    assert await dashboard.me() == me


async def test_claims_that_the_provider_tells_only_on_request_count(
    provider: OidcProvider, dashboard: Dashboard
) -> None:
    provider.person, provider.userinfo = {}, BOB
    assert (await dashboard.log_in()).status_code == 303
    assert await dashboard.me() == {"id": "oidc bob@example.org", "role": "viewer"}


async def test_claims_about_somebody_else_do_not_count(provider: OidcProvider, dashboard: Dashboard) -> None:
    provider.person, provider.userinfo = {}, {**BOB, "sub": "id-of-another"}
    assert (await dashboard.log_in()).status_code == 403
    assert await dashboard.me() == 401


@pytest.mark.parametrize(
    "person",
    [
        {"email": "eve@example.org", "email_verified": True},
        {"email": "ann@example.org", "email_verified": False},
        {"email": "ann@example.org", "email_verified": "false"},
        {"email": "ann@example.org"},
        {"email": "ann@example.org.evil.example", "email_verified": True},
        {"email": "ann@example.org\nx", "email_verified": True},
        {"email": ["ann@example.org"], "email_verified": True},
        {"email": "group:deciders", "email_verified": True},
        {"groups": "deciders"},
        {"groups": ["Deciders", "ann@example.org", "group:deciders"]},
        {"groups": ["deciders"], "sub": "x" * 300},
        {},
    ],
)
async def test_who_is_not_listed_is_refused(
    provider: OidcProvider, dashboard: Dashboard, person: dict[str, Any]
) -> None:
    provider.person = person
    answer = await dashboard.log_in()
    assert answer.status_code == 403
    assert "--oidc-viewers" in answer.text
    assert SESSION not in dashboard.browser.cookies
    assert await dashboard.me() == 401


async def test_who_is_not_listed_reads_their_name_and_what_to_do(provider: OidcProvider, dashboard: Dashboard) -> None:
    provider.person = {"email": "<b>eve</b>@example.org", "email_verified": True}
    answer = await dashboard.log_in()
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "as &lt;b&gt;eve&lt;/b&gt;@example.org" in answer.text
    assert "Ask its operator to add you" in answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'self'")


@pytest.mark.parametrize(
    "lies",
    [
        {"nonce": "another"},
        {"nonce": ABSENT},
        {"aud": "another-client"},
        {"aud": ["another-client"], "azp": CLIENT_ID},
        {"aud": ABSENT},
        {"azp": "another-client"},
        {"iss": "https://accounts.example"},
        {"iss": ABSENT},
        {"exp": 1},
        {"exp": ABSENT},
        {"exp": "never"},
        {"iat": 9_000_000_000},
        {"nbf": 9_000_000_000},
        {"sub": ABSENT},
        {"at_hash": "of-another-token"},
    ],
    ids=str,
)
async def test_an_id_token_that_is_not_for_this_login_is_refused(
    provider: OidcProvider, dashboard: Dashboard, lies: dict[str, Any]
) -> None:
    provider.lies = lies
    await is_refused(dashboard)


@pytest.mark.parametrize("signature", ["none", "foreign", "HS256"])
@pytest.mark.parametrize("advertised", [["RS256"], ["none", "HS256", "RS256"], ["none"], []])
async def test_an_id_token_that_the_provider_did_not_sign_is_refused(
    provider: OidcProvider, dashboard: Dashboard, signature: str, advertised: list[str]
) -> None:
    """Whatever algorithms its document lists."""
    provider.signature = signature
    provider.metadata = {"id_token_signing_alg_values_supported": advertised}
    await is_refused(dashboard)


async def test_a_login_without_an_id_token_is_refused(provider: OidcProvider, dashboard: Dashboard) -> None:
    provider.has_id_token = False
    await is_refused(dashboard)


async def is_refused(dashboard: Dashboard) -> None:
    answer = await dashboard.log_in()
    assert answer.status_code == 400, answer.text
    assert "log in again" in answer.text
    assert SESSION not in dashboard.browser.cookies
    assert await dashboard.me() == 401


@pytest.mark.parametrize("state", ["another", "", None])
async def test_a_callback_with_another_state_is_refused(dashboard: Dashboard, state: str | None) -> None:
    path, _, query = (await dashboard.callback()).partition("?")
    given = {name: values[0] for name, values in parse_qs(query).items() if name != "state"}
    answer = await dashboard.browser.get(path, params=given if state is None else {**given, "state": state})
    assert answer.status_code == 400
    assert await dashboard.me() == 401


async def test_a_callback_of_another_browsers_login_is_refused(provider: OidcProvider, dashboard: Dashboard) -> None:
    """Else somebody could log others in as themselves."""
    callback = await dashboard.callback()
    attackers = dict(dashboard.browser.cookies)
    dashboard.browser.cookies.clear()
    assert (await dashboard.browser.get(callback)).status_code == 400

    await dashboard.browser.get("/login")
    assert (await dashboard.browser.get(callback)).status_code == 400, "nor with a login of its own under way"
    assert attackers.keys() == {ATTEMPT}
    assert await dashboard.me() == 401


async def test_a_callback_is_taken_once(dashboard: Dashboard) -> None:
    callback = await dashboard.callback()
    attempt = dashboard.browser.cookies[ATTEMPT]
    assert (await dashboard.browser.get(callback)).status_code == 303
    assert ATTEMPT not in dashboard.browser.cookies
    dashboard.browser.cookies.clear()

    assert (await dashboard.browser.get(callback)).status_code == 400
    dashboard.browser.cookies.set(ATTEMPT, attempt)
    assert (await dashboard.browser.get(callback)).status_code == 400, "the provider takes a code once"
    assert await dashboard.me() == 401


async def test_a_failed_callback_uses_up_its_attempt(provider: OidcProvider, dashboard: Dashboard) -> None:
    callback = await dashboard.callback()
    answer = await dashboard.browser.get(f"{callback}&error=access_denied&error_description=call+555")
    assert answer.status_code == 400
    assert "access_denied" in answer.text
    assert "555" not in answer.text, "a link must not put words into the dashboard's mouth"
    assert ATTEMPT not in dashboard.browser.cookies
    assert (await dashboard.browser.get(callback)).status_code == 400


async def test_an_attempt_ends_after_some_minutes(dashboard: Dashboard) -> None:
    callback = await dashboard.callback()
    dashboard.clock.ahead += 601
    assert (await dashboard.browser.get(callback)).status_code == 400


async def test_a_session_ends_after_some_hours(dashboard: Dashboard) -> None:
    await dashboard.log_in()
    dashboard.clock.ahead += SESSION_SECONDS - 1
    assert (await dashboard.me())["role"] == "curator"
    dashboard.clock.ahead += 2
    assert await dashboard.me() == 401


async def test_a_forged_cookie_is_refused(provider: OidcProvider, dashboard: Dashboard) -> None:
    await dashboard.log_in()
    cookie = dashboard.browser.cookies[SESSION]
    await dashboard.browser.get("/login")
    attempt = dashboard.browser.cookies[ATTEMPT]
    middle = len(cookie) // 2
    changed = cookie[:middle] + ("A" if cookie[middle] != "A" else "B") + cookie[middle + 1 :]
    for forged in (
        changed,
        cookie[:-4],
        attempt,
        "",
        "x",
        '{"name": "ann", "entry": "ann@example.org"}',
        "é",
        "A" * 99,
    ):
        headers = {"cookie": f"{SESSION}={forged}".encode()}
        dashboard.browser.cookies.clear()
        answer = await dashboard.browser.get("/api/me", headers=headers)  # type: ignore[arg-type]
        assert answer.status_code == 401, forged


@pytest.mark.parametrize(
    "other",
    [{"control": ["another-control-key-of-tests"]}, {"client_id": "another"}, {"curators": [], "viewers": ["x@y.org"]}],
    ids=str,
)
async def test_a_cookie_of_another_dashboard_is_refused(provider: OidcProvider, other: dict[str, Any]) -> None:
    """It has another key or client, or its lists no longer have the person."""
    async with dashboard_at(provider) as first, dashboard_at(provider, **other) as second:
        await first.log_in()
        second.browser.cookies.set(SESSION, first.browser.cookies[SESSION])
        assert await second.me() == 401


async def test_a_session_outlives_a_new_control_key_and_ends_with_its_own(provider: OidcProvider) -> None:
    new = "new-control-key-of-the-tests"
    async with (
        dashboard_at(provider) as before,
        dashboard_at(provider, control=[new, CONTROL]) as rotated,
        dashboard_at(provider, control=[new]) as after,
    ):
        await before.log_in()
        for later in (rotated, after):
            later.browser.cookies.set(SESSION, before.browser.cookies[SESSION])
        assert (await rotated.me())["role"] == "curator"
        assert await after.me() == 401


async def test_who_is_no_longer_a_curator_is_none_at_once(provider: OidcProvider) -> None:
    async with dashboard_at(provider) as before, dashboard_at(provider, curators=(), viewers=CURATORS) as after:
        await before.log_in()
        after.browser.cookies.set(SESSION, before.browser.cookies[SESSION])
        assert (await after.me())["role"] == "viewer"


@pytest.mark.parametrize("headers", ELSEWHERE, ids=str)
async def test_a_page_of_another_site_cannot_use_the_cookie(dashboard: Dashboard, headers: dict[str, str]) -> None:
    await dashboard.log_in()
    assert (await dashboard.curate({**JSON, **headers})).status_code == 403
    assert (await dashboard.browser.post("/logout", headers=headers)).status_code == 403
    assert dashboard.pool.entries == []
    assert (await dashboard.me())["role"] == "curator"


@pytest.mark.parametrize("kind", FOREIGN_TYPES)
async def test_a_form_cannot_use_the_cookie(dashboard: Dashboard, kind: str | None) -> None:
    await dashboard.log_in()
    assert (await dashboard.curate({"Content-Type": kind} if kind else {})).status_code == 415
    assert dashboard.pool.entries == []


async def test_the_servers_own_page_can_use_the_cookie(dashboard: Dashboard) -> None:
    await dashboard.log_in()
    origin = str(dashboard.browser.base_url).rstrip("/")
    assert (await dashboard.curate({**JSON, "Origin": origin, "Sec-Fetch-Site": "same-origin"})).status_code == 200


async def test_a_login_leads_to_the_page_and_nowhere_else(provider: OidcProvider, dashboard: Dashboard) -> None:
    for name in ("next", "redirect", "redirect_uri", "return_to", "url"):
        begun = await dashboard.browser.get("/login", params={name: "https://evil.example/"})
        location = begun.headers["location"]
        assert location.startswith(f"{provider.url}/authorize?")
        assert "evil" not in location
    callback = await dashboard.callback()
    answer = await dashboard.browser.get(f"{callback}&next=https://evil.example&redirect_uri=//evil.example")
    assert (answer.status_code, answer.headers["location"]) == (303, "../")


async def test_the_provider_is_asked_with_pkce_state_and_nonce(provider: OidcProvider, dashboard: Dashboard) -> None:
    await dashboard.callback()
    await dashboard.callback()
    first, second = provider.asked
    for name in ("state", "nonce", "code_challenge"):
        assert len(first[name]) >= 20
        assert first[name] != second[name]
    assert first["redirect_uri"] == f"{str(dashboard.browser.base_url).rstrip('/')}/login/callback"
    assert first["scope"] == "openid email profile"


async def test_groups_are_asked_for_where_the_provider_knows_that_scope(provider: OidcProvider) -> None:
    provider.metadata = {"scopes_supported": ["openid", "groups"]}
    async with dashboard_at(provider) as dashboard:
        await dashboard.callback()
    assert provider.asked[0]["scope"] == "openid email profile groups"


async def test_the_cookie_is_hidden_from_scripts_and_from_other_sites(dashboard: Dashboard) -> None:
    answer = await dashboard.log_in()
    session = next(text for text in answer.headers.get_list("set-cookie") if text.startswith(SESSION))
    assert "HttpOnly" in session
    assert "SameSite=lax" in session
    assert "Path=/" in session
    assert f"Max-Age={SESSION_SECONDS}" in session
    assert "ann" not in session
    assert answer.headers["cache-control"] == "no-store"


async def test_behind_a_proxy_with_tls_the_cookie_is_for_https_only(provider: OidcProvider) -> None:
    async with dashboard_at(provider, public_url="https://stepwell.example/pool/") as dashboard:
        begun = await dashboard.browser.get("/login")
        asked = {name: values[0] for name, values in parse_qs(urlsplit(begun.headers["location"]).query).items()}
        assert asked["redirect_uri"] == "https://stepwell.example/pool/login/callback"
        cookie = begun.headers["set-cookie"]
        assert cookie.startswith(f"__Host-{ATTEMPT}=")
        assert "Secure" in cookie
        assert "Domain" not in cookie

        attempt = {"cookie": cookie.partition(";")[0]}
        query = urlsplit(provider.authorize(asked)).query
        answer = await dashboard.browser.get(f"/login/callback?{query}", headers=attempt)
        session = next(text for text in answer.headers.get_list("set-cookie") if SESSION in text)
        assert session.startswith(f"__Host-{SESSION}=")
        assert "Secure" in session
        by_cookie = {"cookie": session.partition(";")[0]}
        assert (await dashboard.browser.get("/api/me", headers=by_cookie)).json()["role"] == "curator"
        plain = {"cookie": by_cookie["cookie"].removeprefix("__Host-")}
        assert (await dashboard.browser.get("/api/me", headers=plain)).status_code == 401


async def test_a_request_with_a_key_is_judged_by_the_key(dashboard: Dashboard) -> None:
    await dashboard.log_in()
    assert (await dashboard.browser.get("/api/me", headers=bearer("sk-swk-unknown"))).status_code == 401
    assert (await dashboard.browser.get("/api/me", headers=bearer(CONTROL))).json()["role"] == "admin"


async def test_who_logs_out_is_out(dashboard: Dashboard) -> None:
    await dashboard.log_in()
    assert (await dashboard.browser.post("/logout")).status_code == 204
    assert SESSION not in dashboard.browser.cookies
    assert await dashboard.me() == 401


async def test_the_page_is_told_where_to_log_in(dashboard: Dashboard) -> None:
    assert (await dashboard.browser.get("/api/status")).json()["error"]["login"] == "login"
    without = httpx.ASGITransport(make_dashboard(MadeUpPool(4), control_keys=[CONTROL]))
    async with httpx.AsyncClient(transport=without, base_url="http://127.0.0.1:8200") as other:
        assert "login" not in (await other.get("/api/status")).json()["error"]
        for method, path in (("GET", "/login"), ("GET", "/login/callback"), ("POST", "/logout")):
            answer = await other.request(method, path)
            assert (answer.status_code, "--oidc-issuer" in answer.text) == (404, True)


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"issuer": "https://accounts.example"}, "says that it is https://accounts.example"),
        ({"authorization_endpoint": "http://accounts.example/a"}, "authorization_endpoint"),
        ({"token_endpoint": "http://accounts.example/t"}, "token_endpoint"),
        ({"jwks_uri": None}, "jwks_uri"),
        ({"userinfo_endpoint": "file:///etc/passwd"}, "userinfo_endpoint"),
    ],
)
async def test_a_provider_that_is_not_the_one_asked_for_is_not_used(
    provider: OidcProvider, dashboard: Dashboard, metadata: dict[str, Any], why: str
) -> None:
    provider.metadata = metadata
    answer = await dashboard.browser.get("/login")
    assert answer.status_code == 503
    assert why in answer.text
    provider.metadata = {}
    assert (await dashboard.log_in()).status_code == 303, "it is asked again"


async def test_a_provider_that_is_away_is_named(provider: OidcProvider) -> None:
    provider.url = "http://127.0.0.1:1"
    async with dashboard_at(provider) as dashboard:
        answer = await dashboard.browser.get("/login")
    assert answer.status_code == 503
    assert "http://127.0.0.1:1 does not answer" in answer.text


FLAGS = (
    "--control-keys a-control-key-of-the-tests --oidc-issuer https://accounts.example --oidc-client-id us "
    "--oidc-viewers ann@example.org,group:lookers"
).split()


@pytest.mark.parametrize(
    ("replaced", "why"),
    [
        ({"--control-keys": ""}, "--oidc-issuer needs control keys (STEPWELL_DASHBOARD_CONTROL_KEYS)"),
        ({"--oidc-issuer": "http://accounts.example"}, "is not an https address"),
        ({"--oidc-issuer": "https://"}, "is not an https address"),
        ({"--oidc-client-id": ""}, "--oidc-issuer needs --oidc-client-id"),
        ({"--oidc-viewers": ""}, "without them nobody may log in"),
        ({"--oidc-viewers": "ann"}, "'ann' is neither a mail address nor group:NAME"),
        ({"--oidc-viewers": "group:"}, "neither"),
        ({"--oidc-curators": "a@b.org,*"}, "'*' is neither"),
    ],
)
def test_settings_with_which_nobody_could_log_in_safely_are_refused(replaced: dict[str, str], why: str) -> None:
    given = {**dict(zip(FLAGS[::2], FLAGS[1::2], strict=True)), **replaced}
    with pytest.raises(BadRequest, match=".*") as refused:
        read_settings(DashboardSettings, [word for pair in given.items() for word in pair], "stepwell dashboard")
    assert why in str(refused.value)


def test_people_without_a_provider_are_refused() -> None:
    with pytest.raises(BadRequest, match="need --oidc-issuer"):
        read_settings(DashboardSettings, ["--oidc-viewers", "ann@example.org"], "stepwell dashboard")


def test_the_secret_is_no_flag() -> None:
    with pytest.raises(BadRequest, match="unrecognized arguments: --oidc-client-secret"):
        read_settings(DashboardSettings, [*FLAGS, "--oidc-client-secret", "x"], "stepwell dashboard")


def test_without_the_extra_the_flags_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_settings(DashboardSettings, FLAGS, "stepwell dashboard")
    assert login_of(settings, AccessKeys(settings.control_keys)) is not None
    monkeypatch.setitem(sys.modules, "authlib.integrations.starlette_client", None)
    with pytest.raises(BadRequest, match=rf"--oidc-issuer needs .*: {re.escape(install_command('oidc'))}"):
        login_of(settings, AccessKeys(settings.control_keys))


def test_a_login_needs_control_keys(provider: OidcProvider) -> None:
    with pytest.raises(BadRequest, match="a login needs control keys"):
        login_at(provider, control=())
