"""Agents that open rollouts, call the model through one of several gateways at random, and complete them."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from benchmarks.survival.auditor import Auditor

RETRY_PAUSE = 0.5
CALL_TIMEOUT = aiohttp.ClientTimeout(total=90)
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
FINAL = (400, 401, 403, 404, 409, 422)
"""Answers after which a repetition does not help."""


class RolloutRefused(Exception):
    """By a gateway, for good."""


@dataclass(slots=True)
class AgentLoad:
    """Opening and completing is tried until it works, as our client does; a model call is made once."""

    gateways: Sequence[str]
    """URLs. A list may change while agents work."""
    auditor: Auditor
    pause: float = 0.2
    """Seconds between two calls of an agent."""
    most_calls: int = 6
    """A rollout has one call to so many."""
    reward: float | None = 1.0
    """Of every rollout; None leaves it to reward workers."""
    next_prompt: Callable[[], str] | None = None
    """Gives the prompt_uid of the next rollout; without it, the gateway does."""
    uids: set[str] = field(default_factory=set)
    """The trajectories of these agents."""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, agents: int, rollouts: int | None = None) -> None:
        """Until stopped, or until each agent has made so many rollouts. Rollouts that were begun are completed."""
        async with aiohttp.ClientSession(timeout=CALL_TIMEOUT) as http:
            await asyncio.gather(*(self._agent(http, random.Random(n), rollouts) for n in range(agents)))

    async def _agent(self, http: aiohttp.ClientSession, chance: random.Random, rollouts: int | None) -> None:
        made = 0
        while not self.stopped.is_set() and (rollouts is None or made < rollouts):
            try:
                await self._roll_out(http, chance)
            except RolloutRefused:
                self.auditor.refused += 1
            made += 1

    async def _roll_out(self, http: aiohttp.ClientSession, chance: random.Random) -> None:
        wanted = {} if self.next_prompt is None else {"prompt_uid": self.next_prompt()}
        opened = await self._insist(http, chance, "/init_trajectory", wanted)
        uid, path = opened["trajectory_uid"], f"/{opened['trajectory_uid']}/{opened['prompt_uid']}"
        self.uids.add(uid)
        for _ in range(chance.randint(1, self.most_calls)):
            await self._say(http, uid, f"{chance.choice(self.gateways)}{path}/v1/chat/completions")
            await asyncio.sleep(self.pause)
        if self.auditor.answered[uid]:
            self.auditor.ended_at[uid] = time.monotonic()
            await self._insist(http, chance, f"{path}/complete_trajectory", {"reward": self.reward})
            self.auditor.note_completed(uid)

    async def _say(self, http: aiohttp.ClientSession, uid: str, url: str) -> None:
        began = time.monotonic()
        try:
            async with http.post(url, json=BODY) as answer:
                await answer.read()
                self.auditor.statuses[answer.status] += 1
                is_answered = answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            is_answered = False
        self.auditor.note_call(uid, is_answered, time.monotonic() - began)

    async def _insist(
        self, http: aiohttp.ClientSession, chance: random.Random, path: str, body: Mapping[str, object]
    ) -> dict[str, str]:
        while True:
            try:
                async with http.post(chance.choice(self.gateways) + path, json=body) as answer:
                    self.auditor.statuses[answer.status] += 1
                    if answer.status == 200:
                        found: dict[str, str] = await answer.json()
                        return found
                    if answer.status in FINAL:
                        raise RolloutRefused(await answer.text())
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(RETRY_PAUSE)
