"""The key in a base_url, for clients that send no key but the URL's: it is for one trajectory, and goes no further."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.issued_keys import CONTROL, bearer
from rig.local_pool import LocalPool
from stepwell.access.caller import Role
from stepwell.access.key_file import KeyFile, create_key, revoke_key

CHAT: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
async def url(pool: LocalPool, engine: FakeEngine, keys: Path) -> AsyncIterator[str]:
    create_key(keys, Role.VIEWER)
    async with serve_gateway(pool, [engine.url], control_keys=[CONTROL], issued=KeyFile(keys, interval=0.0)) as url:
        yield url


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=60) as http:
        yield http


def with_key(url: str, key: str) -> str:
    return url.replace("://", f"://:{key}@")


async def opened(http: httpx.AsyncClient, url: str, key: str, **wanted: Any) -> dict[str, Any]:
    answer = await http.post(f"{with_key(url, key)}/init_trajectory", json=wanted)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def status(http: httpx.AsyncClient, url: str, body: dict[str, Any] | None = None) -> int:
    return (await http.post(url, json=body or {})).status_code


async def test_it_serves_the_whole_life_of_its_trajectory_in_any_group(
    http: httpx.AsyncClient, url: str, pool: LocalPool
) -> None:
    base_url = (await opened(http, url, CONTROL))["base_url"]
    renamed = f"{base_url.rsplit('/', 2)[0]}/17/v1"
    for call, body in (("register_trajectory", {}), ("chat/completions", CHAT), ("complete_trajectory", {})):
        assert await status(http, f"{renamed}/{call}", body) == 200
    assert [step.prompt_uid for step in pool.taken()] == ["17"]
    assert CONTROL not in base_url


async def test_it_opens_no_other_trajectory_and_gives_no_rewards(http: httpx.AsyncClient, url: str) -> None:
    mine = (await opened(http, url, CONTROL))["base_url"]
    key = urlsplit(mine).password
    assert key is not None
    theirs = (await http.post(f"{url}/init_trajectory", json={"session": True}, headers=bearer(CONTROL))).json()
    other = (await opened(http, url, CONTROL))["base_url"].partition("@")[2]
    session = f"{mine.rsplit('/', 2)[0]}/{theirs['prompt_uid']}/v1"
    for target in (f"{with_key(f'http://{other}', key)}", with_key(theirs["base_url"], key), session):
        assert await status(http, f"{target}/chat/completions", CHAT) == 401
        assert await status(http, f"{target}/complete_trajectory") in (401, 403)
    for path in ("/init_trajectory", "/submit_steps", "/generate", "/session_keys"):
        assert await status(http, f"{with_key(url, key)}{path}") in (401, 403)
    assert await status(http, f"{mine}/feedback", {"value": 1.0}) in (401, 403)


async def test_it_is_not_given_for_a_uid_that_the_caller_chose_nor_to_a_header(
    http: httpx.AsyncClient, url: str
) -> None:
    chosen = await opened(http, url, CONTROL, trajectory_uid="task-0")
    by_header = (await http.post(f"{url}/init_trajectory", json={}, headers=bearer(CONTROL))).json()
    session = await opened(http, url, CONTROL, session=True)
    assert all("@" not in urlsplit(answer["base_url"]).netloc for answer in (chosen, by_header, session))


async def test_it_keeps_the_channels_of_its_opener_and_ends_with_the_openers_key(
    http: httpx.AsyncClient, url: str, keys: Path, pool: LocalPool
) -> None:
    runner, entry = create_key(keys, Role.RUNNER, channels=["mine"])
    base_url = (await opened(http, url, runner))["base_url"]
    assert await status(http, f"{base_url}/register_trajectory", {"channel": "other"}) == 403
    assert await status(http, f"{base_url}/chat/completions", CHAT) == 200
    revoke_key(keys, entry.id)
    assert await status(http, f"{base_url}/chat/completions", CHAT) == 401
    assert await status(http, f"{base_url}/complete_trajectory") == 401
