"""A conversation through a real gateway with the bridge, and all that is known of it: by the script, by the agent, by
the engine and by the trainer."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp
from stepwell.gateway.bridge.recorded_turns import ThinkingPolicy

from benchmarks.bridge_rig.public_templates import NotRendered
from benchmarks.bridge_rig.talk import Message
from benchmarks.exactness_rig.clients import AGENTS, CallRefused, Heard, Packages, Setting
from benchmarks.exactness_rig.observed_engines import ObservedEngine, Sampling
from benchmarks.exactness_rig.scripts import SYSTEM, Turn
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from stepwell.gateway.app import GatewayLimits
from stepwell.steps.step import Step

LONGEST = 100_000
PATIENT = GatewayLimits(render_timeout=600.0)
"""A slow machine changes no result."""


@dataclass(frozen=True)
class Exchange:
    """One call."""

    turn: Turn
    whole_prompt: list[int] | None
    """What the engine makes of all messages of the script so far; None if its template refuses them."""
    served: Message
    """The reply as the engine served it; empty if the call was refused."""
    heard: Heard | None
    """The reply as the agent got it; None if the call was refused."""
    sampled: list[Sampling]


@dataclass
class Conversation:
    exchanges: list[Exchange] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    refusal: str = ""
    """The error with which the last call was answered."""


@dataclass
class ExactnessLab:
    """A gateway with the bridge in front of one engine."""

    engine: ObservedEngine
    pool: LocalPool
    http: aiohttp.ClientSession
    packages: Packages
    _numbers: Any = field(default_factory=count)

    async def converse(
        self, dialect: str, turns: Sequence[Turn], tools: Sequence[Any], *, stream: bool, **options: Any
    ) -> Conversation:
        channel = f"conversation {next(self._numbers)}"
        async with self.http.post("/init_trajectory", json={"channel": channel}) as opened:
            given = await opened.json()
        setting = Setting(given["base_url"], given["api_key"], SYSTEM, tools, options)
        agent, talk = AGENTS[dialect](self.packages, setting), Conversation()
        history: list[Message] = [{"role": "system", "content": SYSTEM}]
        for turn in turns:
            history += turn.new
            self.engine.say_next(history, tools, turn.reply)
            try:
                heard = await agent.ask(turn.new, stream=stream)
            except CallRefused as refused:
                heard, talk.refusal = None, str(refused)
            prompt, served = await self._render(history, tools), self.engine.served() if heard else {}
            talk.exchanges.append(Exchange(turn, prompt, served, heard, self.engine.sampled()))
            if heard is None or len(heard.calls) != len(turn.reply.message.get("tool_calls") or []):
                break  # the script cannot go on
            history.append(served)
        path = f"/{given['trajectory_uid']}/{given['prompt_uid']}/v1/complete_trajectory"
        async with self.http.post(path, json={"reward": 1.0}) as ended:
            assert ended.status == 200, await ended.text()
        talk.steps = self.pool.taken(channel) if talk.exchanges[0].heard is not None else []
        return talk

    async def _render(self, history: Sequence[Message], tools: Sequence[Any]) -> list[int] | None:
        try:
            return await self.engine.render(history, tools)
        except NotRendered:
            return None


@asynccontextmanager
async def exactness_lab(
    engine: ObservedEngine, policy: ThinkingPolicy, packages: Packages
) -> AsyncIterator[ExactnessLab]:
    pool = LocalPool()
    longest: dict[str, Any] = {"prompt_length": LONGEST, "response_length": LONGEST, "limits": PATIENT}
    async with (
        serve_gateway(pool, [engine.url], bridge=policy, **longest) as url,
        aiohttp.ClientSession(url) as http,
    ):
        yield ExactnessLab(engine, pool, http, packages)
