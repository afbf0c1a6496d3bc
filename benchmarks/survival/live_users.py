"""Users of a chat service: each talks in a session that nobody completes, every call at a gateway chosen at random.

A call that gets no answer is made once more at each other gateway, as a load balancer does. Every call has a name in
its message, so a trainer's steps can be compared with the answers.
"""

import asyncio
import random
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

CALL_TIMEOUT = aiohttp.ClientTimeout(total=90)
TURNS = 2, 8
THINKING = 0.1, 0.5
"""Seconds between two calls of a user, at least and at most."""
LONG_PAUSE, LONG_PAUSES = 5.0, 0.05
"""Seconds after which the pool has ended the session as idle, and how many of the pauses are so long."""
THUMBS = 0.8
"""The share of replies to which a user gives a thumb. A reward worker scores the others when the session ends."""
ATTEMPTS = 5
"""Rounds over all gateways, one second apart, after which a user gives up the session."""
NAME = re.compile(rb"call ([0-9a-f]+\.[0-9]+)\.")


class SessionLost(Exception):
    """The service did not answer a user any more."""


@dataclass(slots=True)
class LiveUsers:
    gateways: Sequence[str]
    """URLs."""
    sessions: int = 0
    lost: int = 0
    """Sessions that could not go on."""
    unanswered: int = 0
    """Calls that no gateway answered in one round."""
    answered: Counter[str] = field(default_factory=Counter)
    """How often each answered call was sent, by its name."""
    causes: Counter[str] = field(default_factory=Counter)
    """Of single requests without an answer."""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, users: int) -> None:
        """Until stopped. A session that has begun goes on to its last turn."""
        async with aiohttp.ClientSession(timeout=CALL_TIMEOUT) as http:
            await asyncio.gather(*(self._come_and_go(http, random.Random(number)) for number in range(users)))

    async def _come_and_go(self, http: aiohttp.ClientSession, chance: random.Random) -> None:
        while not self.stopped.is_set():
            self.sessions += 1
            try:
                await self._talk(http, chance)
            except SessionLost:
                self.lost += 1

    async def _talk(self, http: aiohttp.ClientSession, chance: random.Random) -> None:
        session, messages = secrets.token_hex(8), list[Mapping[str, str]]()
        opening = {"session": True, "trajectory_uid": session}
        opened, _ = await self._insist(http, chance, "/init_trajectory", opening)
        path = f"/{opened['trajectory_uid']}/{opened['prompt_uid']}"
        for turn in range(chance.randint(*TURNS)):
            name = f"{session}.{turn}"
            messages.append({"role": "user", "content": f"call {name}."})
            body = {"model": "tiny", "messages": messages, "max_tokens": 8}
            reply, sent = await self._insist(http, chance, f"{path}/v1/chat/completions", body)
            self.answered[name] = sent
            messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
            if chance.random() < THUMBS:
                await self._insist(http, chance, f"{path}/feedback", {"value": 1.0, "step_index": "last"})
            await asyncio.sleep(LONG_PAUSE if chance.random() < LONG_PAUSES else chance.uniform(*THINKING))

    async def _insist(
        self, http: aiohttp.ClientSession, chance: random.Random, path: str, body: Mapping[str, object]
    ) -> tuple[dict[str, Any], int]:
        """The answer, and how often the call was sent."""
        sent = 0
        for _ in range(ATTEMPTS):
            for url in chance.sample(self.gateways, len(self.gateways)):
                sent += 1
                answer = await self._ask(http, url + path, body)
                if answer is not None:
                    return answer, sent
            self.unanswered += 1
            await asyncio.sleep(1.0)
        raise SessionLost

    async def _ask(self, http: aiohttp.ClientSession, url: str, body: Mapping[str, object]) -> dict[str, Any] | None:
        try:
            async with http.post(url, json=body) as answer:
                if answer.status == 200:
                    found: dict[str, Any] = await answer.json()
                    return found
                self.causes[f"{url.rpartition('/')[2]} {answer.status} {(await answer.text())[:200]}"] += 1
        except (aiohttp.ClientError, TimeoutError) as failure:
            self.causes[type(failure).__name__] += 1
        return None


def name_of_call(prompt_ids: Iterable[int]) -> str:
    """The last call that a prompt names. A token of the tiny vocabulary is a byte."""
    names: list[bytes] = NAME.findall(bytes(token for token in prompt_ids if token < 256))
    return names[-1].decode()
