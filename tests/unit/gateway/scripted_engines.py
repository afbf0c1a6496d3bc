"""Engines that answer from a script, without a network."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import aiohttp

from stepwell.engines.engine import Capabilities, Questions
from stepwell.engines.fleet import Engines
from stepwell.engines.replica import Engine
from stepwell.engines.replies import EngineAnswer, EngineReply
from stepwell.engines.vllm_generate import Generated
from stepwell.steps.step import JsonObject


def make_engine(address: str = "http://e", *, weight_info: bool = True) -> Engine:
    engine = Engine(address, cast("Questions", None), lambda: None)
    engine.capabilities = Capabilities(token_ids=True, generate=True, weight_info=weight_info)
    return engine


@dataclass
class ScriptedBody:
    """As much of aiohttp's response as is looked at."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    async def read(self) -> bytes:
        return self.body

    def close(self) -> None:
        """There is no connection."""


class ScriptedEngines(Engines):
    def __init__(self) -> None:
        super().__init__([])
        self.engine = make_engine()
        self.versions: dict[Engine, int | None] = {}
        """What each engine says its version is."""
        self.asked_versions: list[Engine] = []
        self.generations: list[Generated | EngineAnswer] = []
        """The answers to come."""
        self.generated: list[tuple[list[int], JsonObject]] = []
        """What was asked for."""
        self.answers: list[ScriptedBody] = []
        self.sent: list[tuple[str, bytes]] = []

    async def version_after(self, engine: Engine) -> int | None:
        self.asked_versions.append(engine)
        return self.versions.get(engine)

    async def generate(self, prompt_ids: Sequence[int], sampling: JsonObject) -> Generated | EngineAnswer:
        self.generated.append((list(prompt_ids), sampling))
        return self.generations.pop(0)

    async def send(self, path: str, body: Callable[[Capabilities], bytes], *, sticky: str = "") -> EngineReply:
        self.sent.append((path, body(self.engine.capabilities)))
        return EngineReply(self.engine, cast("aiohttp.ClientResponse", self.answers.pop(0)), None)
