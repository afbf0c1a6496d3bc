"""Asking a dashboard, as the page does."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

KEY = "a-control-key-for-tests"
BEARER = {"Authorization": f"Bearer {KEY}"}


async def get(client: httpx.AsyncClient, path: str, **params: Any) -> Any:
    answer = await client.get(f"/api/{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def known(client: httpx.AsyncClient, *, trajectories: int, texts: int = 0) -> None:
    """Wait until the dashboard has read so many."""

    async def has_read() -> bool:
        index = (await get(client, "status"))["index"]
        return bool(index["trajectories"] >= trajectories and index["texts"] >= texts)

    await eventually(has_read, f"{trajectories} trajectories and {texts} texts to be read")


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not await condition():
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        await asyncio.sleep(0.05)


async def curate(client: httpx.AsyncClient, action: str, *uids: tuple[str, str], **more: Any) -> Any:
    named = [{"trajectory_uid": uid, "prompt_uid": prompt} for uid, prompt in uids]
    body = {"action": action, "trajectories": named, "by": "ada", **more}
    answer = await client.post("/api/curate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["outcomes"]
