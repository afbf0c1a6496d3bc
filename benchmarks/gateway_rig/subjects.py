"""What is measured: something that clients call as they would call an engine, and that proves what it recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.gateway_rig import canned
from benchmarks.gateway_rig.processes import Server, cpu_seconds, module, serving
from benchmarks.gateway_rig.spoken import CHAT
from rig.waiting import wait_until

CHAT_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Door:
    """Where one client calls."""

    path: str
    key: str = "not-needed"


class Subject(Protocol):
    name: str
    dialect: str
    """That its clients speak."""

    @property
    def server(self) -> Server: ...

    def open(self, clients: int) -> list[Door]:
        """Before a round: a door for each client."""

    def settle(self, calls: int) -> None:
        """After a round's last answer: return when all that these calls brought about is done."""

    def check(self, calls: int) -> None:
        """Raise unless all these calls are recorded, and let go of them."""

    def cpu(self) -> float:
        """Seconds used so far, by all processes that the subject is made of."""


class Plain:
    """Records nothing, and so has nothing to prove: the engine itself, a plain proxy, litellm as it comes."""

    dialect = CHAT

    def __init__(self, name: str, server: Server) -> None:
        self.name, self.server = name, server

    def open(self, clients: int) -> list[Door]:
        return [Door(CHAT_PATH)] * clients

    def settle(self, calls: int) -> None: ...

    def check(self, calls: int) -> None: ...

    def cpu(self) -> float:
        return cpu_seconds(self.server.pid)


class BareRecorder(Plain):
    def open(self, clients: int) -> list[Door]:
        self._before = self.server.ask("/records")
        return super().open(clients)

    def check(self, calls: int) -> None:
        now = self.server.ask("/records")
        assert now["calls"] - self._before["calls"] == calls, (now, self._before, calls)
        assert now["tokens"] - self._before["tokens"] == calls * canned.RESPONSE


class Rllm(Plain):
    """rllm-model-gateway, which keeps a trace for each call of a session."""

    def open(self, clients: int) -> list[Door]:
        self._sessions = [self.server.ask("/sessions", {})["session_id"] for _ in range(clients)]
        return [Door(f"/sessions/{session}{CHAT_PATH}") for session in self._sessions]

    def settle(self, calls: int) -> None:
        wait_until(lambda: self._traces() >= calls, f"{calls} traces of rllm-model-gateway")

    def check(self, calls: int) -> None:
        assert self._traces() == calls, (self._traces(), calls)
        (trace,) = self.server.ask(f"/sessions/{self._sessions[0]}/traces?limit=1")
        assert len(trace["completion_token_ids"]) == len(trace["logprobs"]) == canned.RESPONSE
        for session in self._sessions:
            self.server.ask(f"/sessions/{session}", method="DELETE")

    def _traces(self) -> int:
        mine = set(self._sessions)
        return sum(s["trace_count"] for s in self.server.ask("/sessions") if s["session_id"] in mine)


@contextmanager
def bare_subjects(engine: Server, folder: Path) -> Iterator[list[Subject]]:
    """The engine itself, and the proxies that have no more than they need."""
    with (
        serving(module("byte_proxy", "--engine", engine.url), folder / "byte_proxy.log") as bytes_,
        serving(module("recording_proxy", "--engine", engine.url), folder / "recording_proxy.log") as recorder,
    ):
        yield [Plain("direct", engine), Plain("byte_proxy", bytes_), BareRecorder("bare_recorder", recorder)]
