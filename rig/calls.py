"""One HTTP call and its answer, as the rig's own tests make them: with nothing of Stepwell's in between."""

import json
from dataclasses import dataclass
from typing import Any

import aiohttp

DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)

    def events(self) -> list[str]:
        """The payloads of a stream, `[DONE]` among them."""
        return [line.removeprefix("data: ") for line in self.text.splitlines() if line]

    def chunks(self) -> list[Any]:
        return [json.loads(event) for event in self.events() if event != DONE]


async def call(method: str, url: str, body: Any = None) -> Answer:
    async with aiohttp.ClientSession() as session, session.request(method, url, json=body) as reply:
        return Answer(reply.status, await reply.text())


async def get(url: str) -> Answer:
    return await call("GET", url)


async def post(url: str, body: Any = None) -> Answer:
    return await call("POST", url, body)
