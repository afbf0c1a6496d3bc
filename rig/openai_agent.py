"""An agent as its owner writes it, with the real openai package: it knows a base_url and a key."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai

HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 24}


@dataclass(frozen=True, slots=True)
class Heard:
    """What came of a call, whether it was streamed or not."""

    text: str
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Agent:
    client: openai.AsyncOpenAI
    http: aiohttp.ClientSession
    """For whoever runs the agent, and for what no SDK would do."""
    path: str

    @property
    def chat(self) -> str:
        return f"{self.path}/v1/chat/completions"

    async def ask(self, *, stream: bool = False, **wanted: Any) -> Heard:
        create = self.client.chat.completions.create
        if not stream:
            choice = (await create(**{**HELLO, **wanted})).choices[0]
            return Heard(choice.message.content or "", choice.finish_reason)
        pieces = [piece async for chunk in await create(**{**HELLO, **wanted}, stream=True) for piece in chunk.choices]
        return Heard("".join(piece.delta.content or "" for piece in pieces), pieces[-1].finish_reason)

    async def complete(self, **wanted: Any) -> str:
        """Gives how it ended; the pool has all of its steps by then."""
        async with self.http.post(f"{self.path}/v1/complete_trajectory", json=wanted) as ended:
            answer = await ended.json()
            assert ended.status == 200, answer
            return str(answer["status"])

    async def say(self, *, headers: dict[str, str] | None = None, **wanted: Any) -> tuple[int, str]:
        """A call by a client that knows nothing of OpenAI's SDKs: its status and its text."""
        async with self.http.post(self.chat, json={**HELLO, **wanted}, headers=headers) as answer:
            return answer.status, await answer.text()

    async def metric(self, line: str) -> float | None:
        """The value of one line of /metrics, None where there is none."""
        async with self.http.get("/metrics") as shown:
            lines = (await shown.text()).splitlines()
        return next((float(found.removeprefix(line)) for found in lines if found.startswith(f"{line} ")), None)

    async def until_metric(self, line: str, value: float) -> None:
        async with asyncio.timeout(60):
            while await self.metric(line) != value:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def agent_of(url: str, *, control_key: str | None = None, **opening: Any) -> AsyncIterator[Agent]:
    """A new trajectory of the gateway at `url`."""
    headers = {"Authorization": f"Bearer {control_key}"} if control_key else {}
    async with aiohttp.ClientSession(url, headers=headers) as http:
        async with http.post("/init_trajectory", json=opening) as opened:
            given = await opened.json()
            assert opened.status == 200, given
        async with openai.AsyncOpenAI(base_url=given["base_url"], api_key=given["api_key"], max_retries=0) as client:
            yield Agent(client, http, f"/{given['trajectory_uid']}/{given['prompt_uid']}")
