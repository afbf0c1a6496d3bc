"""Rounds: one subject, one kind of call, all clients, until its seconds are over and all that it recorded is proved."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.gateway_rig.canned import CHUNKS
from benchmarks.gateway_rig.load import Load, Order
from benchmarks.gateway_rig.processes import LoadProcess, Server
from benchmarks.gateway_rig.subjects import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of call."""

    name: str
    stream: bool
    gap: float = 0.0
    """Seconds between a stream's chunks; 0: as fast as they are read."""


UNSTREAMED = Kind(name="unstreamed", stream=False)
STREAMED = Kind(name="streamed", stream=True)
PACED = Kind(name="paced", stream=True, gap=0.01)
SLOW = Kind(name="slow", stream=True, gap=0.2 / CHUNKS)
"""An engine that takes 200 ms."""
KINDS = (UNSTREAMED, STREAMED, PACED)


@dataclass(frozen=True, slots=True)
class Round:
    load: Load
    cpu_ms: float
    """A call, of all the subject's processes."""

    @property
    def calls_s(self) -> float:
        return self.load.calls / self.load.seconds


class Course:
    """All subjects, measured in turns so that what else the machine does falls on all alike."""

    def __init__(self, engine: Server, load: LoadProcess, subjects: Sequence[Subject]) -> None:
        self.engine, self.load = engine, load
        self.subjects = subjects
        self.rounds: dict[tuple[str, str], list[Round]] = {}
        """By the subject's and the kind's name."""

    def run(self, kind: Kind, *, rounds: int, clients: int, seconds: float, say: Callable[[str], None]) -> None:
        self.engine.ask("/rig/pace", {"gap": kind.gap}, method="PUT")
        for subject in self.subjects:
            self.measure(subject, kind, clients, seconds / 2)  # warms up
        for number in range(rounds):
            turn = number % len(self.subjects)
            for subject in (*self.subjects[turn:], *self.subjects[:turn]):
                measured = self.measure(subject, kind, clients, seconds)
                self.rounds.setdefault((subject.name, kind.name), []).append(measured)
                figures = f"{measured.calls_s:>8,.0f} calls/s {measured.cpu_ms:>8.3f} ms CPU a call"
                say(f"{kind.name} {number + 1}/{rounds} {subject.name:>18} {figures}")

    def measure(self, subject: Subject, kind: Kind, clients: int, seconds: float) -> Round:
        doors = subject.open(clients)
        order = Order(
            port=subject.server.port,
            paths=[door.path for door in doors],
            keys=[door.key for door in doors],
            stream=kind.stream,
            dialect=subject.dialect,
            seconds=seconds,
        )
        before = subject.cpu()
        load = self.load.run(order)
        assert not load.errors, f"{subject.name}, {kind.name}: {load.errors}"
        subject.settle(load.calls)
        cpu = subject.cpu() - before
        subject.check(load.calls)
        return Round(load, cpu / load.calls * 1e3)

    def median(self, subject: str, kind: Kind, value: Callable[[Round], float]) -> float:
        return statistics.median(value(measured) for measured in self.rounds[subject, kind.name])

    def ratio(self, subject: str, other: str, kind: Kind) -> float:
        """How many times the other's CPU a call costs: the median over rounds, each compared with its neighbour."""
        pairs = zip(self.rounds[subject, kind.name], self.rounds[other, kind.name], strict=True)
        return statistics.median(a.cpu_ms / b.cpu_ms for a, b in pairs)
