"""Engines that answer from a script, without a network."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from stepwell.engines.connections import EngineConnections, HttpReply
from stepwell.engines.engine import EngineFacts, EngineHttp, EngineRequest, Generated
from stepwell.engines.fleet import EngineFleet, MakeRequest
from stepwell.engines.replica import EngineReplica, EngineReply, RefusedReply
from stepwell.engines.vllm import VllmEngine
from stepwell.steps.step import JsonObject


def make_engine(address: str = "http://e", *, weight_versions: bool = True) -> EngineReplica:
    http = EngineHttp(EngineConnections(), address)
    engine = EngineReplica(http, [VllmEngine()], lambda: None)
    engine.facts = EngineFacts(
        token_ids=True, generate=True, derender=True, reports_version=True, weight_versions=weight_versions
    )
    return engine


@dataclass
class ScriptedBody:
    """As much of an engine's reply as is looked at."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    async def read(self) -> bytes:
        return self.body

    def close(self) -> None:
        """There is no connection."""


class ScriptedEngines(EngineFleet):
    def __init__(self) -> None:
        super().__init__([])
        self.engine = make_engine()
        self.versions: dict[EngineReplica, int | None] = {}
        """What each engine says its version is."""
        self.asked_versions: list[EngineReplica] = []
        self.generations: list[Generated | RefusedReply] = []
        """The answers to come."""
        self.generated: list[tuple[list[int], JsonObject]] = []
        """What was asked for."""
        self.answers: list[ScriptedBody] = []
        self.sent: list[EngineRequest] = []

    async def version_after(self, engine: EngineReplica) -> int | None:
        self.asked_versions.append(engine)
        return self.versions.get(engine)

    async def generate(self, prompt_ids: Sequence[int], sampling: JsonObject) -> Generated | RefusedReply:
        self.generated.append((list(prompt_ids), sampling))
        return self.generations.pop(0)

    async def _send(self, make_request: MakeRequest, sticky: str = "", *, samples: bool = True) -> EngineReply:
        self.sent.append(make_request(self.engine))
        return EngineReply(self.engine, cast("HttpReply", self.answers.pop(0)), None)
