"""Sends hostile requests to one surface over several connections, and judges every answer."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from rig.hostile.exchange import ConnectionLost, HostileAnswer, PlainConnection
from rig.hostile.operations import Operation
from rig.hostile.requests import HostileRequest, RequestMaker

LAST_EVENTS = (b"message_stop\n", b"response.completed\n", b"response.incomplete\n")
"""Of dialects whose streams have named events."""
LONGEST_WAIT = 20.0
CONNECTIONS = 4
EXAMPLES = 20
ENDINGS = ("complete_trajectory", "abort_trajectory")
NO_NAMES: dict[str, str] = {}


@dataclass(slots=True)
class HostileReport:
    """What came back."""

    statuses: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    """By kind: unmeant_5xx, hangs, lost_connections, unexplained."""
    examples: list[str] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    """By operation."""
    broken: int = 0
    """Requests that were not HTTP."""
    slowest: float = 0.0
    """Seconds."""
    slowest_request: str = ""

    def note(self, fault: str, request: HostileRequest, text: str) -> None:
        self.faults[fault] += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(f"{fault}: {request.what}: {text}\n    {request.raw[:600]!r}")

    @property
    def answered(self) -> int:
        """Requests with a success."""
        return sum(count for status, count in self.statuses.items() if status < 300)


@dataclass(frozen=True, slots=True)
class HostileSurface:
    name: str
    url: str
    operations: Sequence[Operation]
    keys: Sequence[str]
    """The first one is a control key."""
    may_fail: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Statuses from 500 that are meant, by path: what the call needs is not there."""

    async def attack(self, count: int, seed: int = 0, connections: int = CONNECTIONS) -> HostileReport:
        report = HostileReport()
        shares = [count // connections + (n < count % connections) for n in range(connections)]
        await asyncio.gather(
            *(self._attack(report, share, random.Random(f"{seed}-{n}")) for n, share in enumerate(shares))
        )
        return report

    async def _attack(self, report: HostileReport, count: int, chance: random.Random) -> None:
        maker, names = RequestMaker(self.operations, self.keys, chance), NO_NAMES
        async with PlainConnection(self.url) as connection:
            for _ in range(count):
                operation = maker.choose()
                if "{trajectory_uid}" in operation.path and (not names or operation.path.endswith(ENDINGS)):
                    names = await self._open(connection)
                await self._ask(report, connection, maker.make(operation, names))

    async def _open(self, connection: PlainConnection) -> dict[str, str]:
        """A new trajectory, so that requests get past the door."""
        head = f"POST /init_trajectory HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.keys[0]}\r\n"
        async with asyncio.timeout(LONGEST_WAIT):
            answer = await connection.ask(f"{head}Content-Length: 0\r\n\r\n".encode())
        opened = orjson.loads(answer.body)
        return {name: opened[name] for name in ("trajectory_uid", "prompt_uid")}

    async def _ask(self, report: HostileReport, connection: PlainConnection, request: HostileRequest) -> None:
        report.asked[request.what] += 1
        report.broken += request.is_broken
        began = time.monotonic()
        try:
            async with asyncio.timeout(LONGEST_WAIT):
                answer = await connection.ask(request.raw, is_head=request.is_head, ends=request.is_broken)
        except TimeoutError:
            report.note("hangs", request, f"no answer within {LONGEST_WAIT:g} s")
        except ConnectionLost as lost:
            if not request.is_broken:
                report.note("lost_connections", request, str(lost))
        else:
            report.statuses[answer.status] += 1
            if (seconds := time.monotonic() - began) > report.slowest:
                report.slowest, report.slowest_request = seconds, f"{request.what} {request.raw[:300]!r}"
            self._judge(report, request, answer)

    def _judge(self, report: HostileReport, request: HostileRequest, answer: HostileAnswer) -> None:
        shown = f"{answer.status} {answer.body[-300:]!r}"
        if answer.status >= 500:
            if answer.status not in self.may_fail.get(request.what.partition(" ")[2], ()):
                report.note("unmeant_5xx", request, shown)
        elif answer.status >= 400:
            if not request.is_broken and not request.is_head and not _explains(answer.body):
                report.note("unexplained", request, shown)
        elif answer.headers.get(b"content-type", b"").startswith(b"text/event-stream") and not _is_whole(answer.body):
            report.note("cut_streams", request, shown)


def _explains(body: bytes) -> bool:
    try:
        answer = orjson.loads(body)
        return bool(answer["error"]["message"] if "error" in answer else answer["detail"])
    except (ValueError, TypeError, KeyError):
        return False


def _is_whole(stream: bytes) -> bool:
    """It has the last event of its dialect, and no error."""
    if b'\ndata: {"error"' in b"\n" + stream:
        return False
    return stream.endswith(b"data: [DONE]\n\n") or stream.rpartition(b"\n\nevent: ")[2].startswith(LAST_EVENTS)
