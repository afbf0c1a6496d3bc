"""A chat service and its simulated users, as their own process, which uses only a gateway.

    python -m stepwell.demo.live_service ORDERS

It follows `talk` (users come, until `stop`) and `stop` (no more users come; it waits for those who are here). See
agent_process.py.

- The service opens a session for each conversation, calls the model with an OpenAI client, and never says that a
  session has ended.
- Users are independent of each other: each place is taken by one user after another.
"""

import asyncio
import random
import secrets
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stepwell import logs
from stepwell.demo.agent_process import Orders, follow, sdk_client
from stepwell.demo.live_outcome import UserTurn, write_turn
from stepwell.demo.live_service import SimulatedUser

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessageParam

LONGEST_REPLY = 5
"""Tokens."""
THINKING = 0.2
"""Mean seconds between a reply and what its user does next."""


class UserConversation:
    """One session of a user, as the service sees it."""

    def __init__(self, client: "AsyncOpenAI") -> None:
        self.id = secrets.token_hex(16)
        self._client = client
        self._messages: list[ChatCompletionMessageParam] = []
        self._replies = 0

    async def say(self, message: str) -> str:
        """Returns the model's reply."""
        if not self._messages:
            await self._open()
        self._messages.append({"role": "user", "content": message})
        answer = await self._client.chat.completions.create(
            model="demo", messages=self._messages, temperature=1.0, max_tokens=LONGEST_REPLY
        )
        reply = answer.choices[0].message.content or ""
        self._messages.append({"role": "assistant", "content": reply})
        self._replies += 1
        return reply

    async def _open(self) -> None:
        body = {"session": True, "trajectory_uid": self.id}
        opened = await self._client.post("/init_trajectory", body=body, cast_to=dict)
        self._client = self._client.with_options(base_url=opened["base_url"], api_key=opened["api_key"])

    async def press_thumb(self, *, up: bool) -> None:
        """About the last reply."""
        body = {"value": 1.0 if up else -1.0, "step_index": self._replies - 1, "source": "thumb"}
        await self._client.post("/feedback", body=body, cast_to=object)


class LiveService:
    def __init__(
        self, client: "AsyncOpenAI", orders: Orders, write: Callable[[UserTurn], None], thinking: float = THINKING
    ) -> None:
        self._client = client
        self._rng = random.Random(orders.seed)
        self._write = write
        self._thinking = thinking
        self._places = orders.concurrency
        self._is_open = False
        self._talking: list[asyncio.Task[None]] = []

    async def do(self, order: str) -> float:
        match order:
            case "talk":
                self._is_open = True
                self._talking = [asyncio.create_task(self._fill_place()) for _ in range(self._places)]
            case "stop":
                await self.stop()
        return 0.0

    async def stop(self) -> None:
        """No more users come; those who are here finish."""
        self._is_open = False
        await asyncio.gather(*self._talking)
        self._talking = []

    async def _fill_place(self) -> None:
        while self._is_open:
            await self.serve(SimulatedUser(random.Random(self._rng.random())))

    async def serve(self, user: SimulatedUser) -> None:
        """One session. A user whose call fails leaves."""
        conversation = UserConversation(self._client)
        message: str | None = user.opening()
        while message is not None:
            await self._think()
            try:
                reaction = user.react(await conversation.say(message))
                if reaction.thumb is not None:
                    await conversation.press_thumb(up=reaction.thumb)
            except Exception as failure:  # noqa: BLE001 - every cause is counted
                self._write(UserTurn(at=time.time(), session=conversation.id, failure=failure_text(failure)))
                return
            is_thumb = reaction.thumb is not None
            self._write(UserTurn(at=time.time(), session=conversation.id, accepted=reaction.accepted, thumb=is_thumb))
            message = reaction.message

    async def _think(self) -> None:
        await asyncio.sleep(self._rng.expovariate(1 / self._thinking) if self._thinking else 0.0)


def failure_text(failure: Exception) -> str:
    """The cause of a failed call, short and without ids, so that equal causes are counted together."""
    status = getattr(failure, "status_code", None)
    code = getattr(failure, "code", None)
    return " ".join(str(part) for part in (type(failure).__name__, status, code) if part is not None)


if __name__ == "__main__":
    logs.setup(json=False)
    told = Orders.from_json(sys.argv[1])
    with Path(told.turns).open("w") as turns_file:
        asyncio.run(follow(told, lambda url: LiveService(sdk_client(url), told, partial(write_turn, turns_file))))
