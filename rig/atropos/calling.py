"""An Atropos server, called as an environment and a trainer call it, by tests that look at each answer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

BATCH_SIZE = 4

Group = dict[str, Any]


class AtroposClient:
    """An Atropos server, as an environment and a trainer call it."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self.url, self.client = url, client

    async def register(self, batch_size: int = BATCH_SIZE, **fields: Any) -> None:
        """A trainer that has asked once, which lets environments in."""
        await self.register_trainer(batch_size, **fields)
        assert await self.batch() is None

    async def register_trainer(self, batch_size: int, **fields: Any) -> None:
        trainer = {"wandb_group": "g", "wandb_project": "p", "batch_size": batch_size, "max_token_len": 10_000}
        steps = {"checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 100}
        answer = await self.client.post("/register", json=trainer | steps | fields)
        assert answer.status_code == 200, answer.text

    async def register_env(self, name: str, **fields: Any) -> int:
        env = {"max_token_length": 128, "desired_name": name, "weight": 1.0, "group_size": 2} | fields
        answer = (await self.client.post("/register-env", json=env)).json()
        assert answer["status"] == "success"
        env_id: int = answer["env_id"]
        return env_id

    async def post(self, group: Group) -> httpx.Response:
        return await self.client.post("/scored_data", json=group)

    async def send(self, *groups: Group) -> None:
        for group in groups:
            answer = await self.post(group)
            assert answer.json() == {"status": "received"}, answer.text

    async def batch(self) -> list[Group] | None:
        answer = await self.client.get("/batch")
        assert answer.status_code == 200, answer.text
        batch: list[Group] | None = answer.json()["batch"]
        return batch

    async def tokens(self) -> list[list[list[int]]]:
        """Of the next batch, group by group."""
        batch = await self.batch()
        assert batch is not None
        return [group["tokens"] for group in batch]

    async def status(self) -> dict[str, int]:
        status: dict[str, int] = (await self.client.get("/status")).json()
        return status

    async def status_env(self, env_id: int) -> dict[str, Any]:
        answer = await self.client.request("GET", "/status-env", json={"env_id": env_id})
        assert answer.status_code == 200, answer.text
        status: dict[str, Any] = answer.json()
        return status


@asynccontextmanager
async def calling(url: str) -> AsyncIterator[AtroposClient]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        yield AtroposClient(url, client)


def make_group(number: int, *, size: int = 2, length: int = 4, **fields: Any) -> Group:
    """Sequences that say which group and which of its places they are of; the first token is the prompt."""
    tokens = [[number, place, *range(length - 2)] for place in range(size)]
    masks = [[-100, *sequence[1:]] for sequence in tokens]
    return {"tokens": tokens, "masks": masks, "scores": [float(place) for place in range(size)]} | fields
