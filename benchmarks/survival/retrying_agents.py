"""Agents that make each call again, at another gateway chosen at random, until they have read an answer to it.

Each answer has a text of its own, so it is known which one an agent has read. An agent goes on from what it has read.
"""

import asyncio
import random
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp

from rig.fake_engine import FakeEngine, Faults
from rig.texts import text_of

RETRY_PAUSE = 0.2
ATTEMPTS = 30
"""Of one call."""
COMPLETION_TIMEOUT = aiohttp.ClientTimeout(total=60)
LONGEST = 24
"""Tokens of an answer."""
TOKEN_DELAY = 0.005
STREAMED = 0.5
"""The share of the calls."""


def answer_uniquely(engine: FakeEngine) -> None:
    """The same request has another answer each time, written token by token."""
    engine.faults = Faults(ignore_seed=True, token_delay_s=TOKEN_DELAY)


@dataclass(slots=True)
class RetryingAgents:
    gateways: Sequence[str]
    """URLs. A list may change while agents work."""
    has_keys: bool
    """Each call has an Idempotency-Key. Without, a retry is only told by the count that the SDKs send."""
    timeout: float = 30.0
    """Seconds of a call."""
    calls: tuple[int, int] = (5, 5)
    """Of a rollout, at least and at most."""
    pause: float = 0.0
    """Seconds between two calls of an agent, on average."""
    prompts: dict[str, str] = field(default_factory=dict)
    """The prompt_uid of each completed rollout, by its trajectory."""
    read: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The texts of the answers that were read, by trajectory."""
    asked: int = 0
    """Requests for an answer."""
    unanswered: int = 0
    """Calls that were given up."""
    last_read: str = ""
    """The gateway from which the last answer came."""
    on_read: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self, agents: int, rollouts: int) -> None:
        """So many rollouts in all, each completed."""
        numbers = iter(range(rollouts))

        async def work(http: aiohttp.ClientSession) -> None:
            for number in numbers:
                await self._roll_out(http, random.Random(number))

        async with aiohttp.ClientSession() as http:
            await asyncio.gather(*(work(http) for _ in range(agents)))

    async def _roll_out(self, http: aiohttp.ClientSession, chance: random.Random) -> None:
        opened = await self._insist(http, chance, "/init_trajectory", {})
        uid, path = opened["trajectory_uid"], f"/{opened['trajectory_uid']}/{opened['prompt_uid']}"
        messages = [{"role": "user", "content": "begin"}]
        for _ in range(chance.randint(*self.calls)):
            text = await self._ask(http, chance, f"{path}/v1/chat/completions", messages)
            if text is None:
                self.unanswered += 1
                continue
            self.read[uid].append(text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
            await asyncio.sleep(2 * self.pause * chance.random())
        await self._insist(http, chance, f"{path}/complete_trajectory", {"reward": 1.0})
        self.prompts[uid] = opened["prompt_uid"]

    async def _ask(
        self, http: aiohttp.ClientSession, chance: random.Random, path: str, messages: list[dict[str, str]]
    ) -> str | None:
        """The text that was read. An SDK counts its tries, but does not repeat a stream that has begun."""
        is_streamed = chance.random() < STREAMED
        body = {"model": "tiny", "messages": messages, "max_tokens": LONGEST, "stream": is_streamed}
        key = {"Idempotency-Key": str(uuid.uuid4())} if self.has_keys else {}
        tries = count()
        for _ in range(ATTEMPTS):
            self.asked += 1
            gateway, has_begun = chance.choice(self.gateways), False
            try:
                async with http.post(
                    gateway + path,
                    json=body,
                    headers={**key, "x-stainless-retry-count": str(next(tries))},
                    timeout=aiohttp.ClientTimeout(total=self.timeout),
                ) as answer:
                    has_begun = is_streamed and answer.status == 200
                    text = text_of(await answer.read()) if answer.status == 200 else None
            except (aiohttp.ClientError, TimeoutError):
                text = None
            if text is not None:
                await self._note(gateway)
                return text
            if has_begun:
                tries = count()
            await asyncio.sleep(RETRY_PAUSE)
        return None

    async def _note(self, gateway: str) -> None:
        self.last_read = gateway
        async with self.on_read:
            self.on_read.notify_all()

    async def _insist(
        self, http: aiohttp.ClientSession, chance: random.Random, path: str, body: Mapping[str, object]
    ) -> dict[str, Any]:
        while True:
            try:
                async with http.post(
                    chance.choice(self.gateways) + path, json=body, timeout=COMPLETION_TIMEOUT
                ) as answer:
                    if answer.status == 200:
                        found: dict[str, Any] = await answer.json()
                        return found
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(RETRY_PAUSE)
