"""The clients: keep-alive connections that call one after the other, written so that they cost as little as they can.

A process of its own, driven by lines of JSON: an `Order` in, a `Load` out.

    python -m benchmarks.gateway_rig.load
"""

import asyncio
import json
import resource
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import cast

import httptools
import uvloop

from benchmarks.gateway_rig.spoken import CHAT, SPOKEN

CONNECTING = 256
"""Connections opened at once: no listener's backlog overflows."""
TAIL = 32
"""As many bytes as the longest ending has, and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    port: int
    paths: list[str]
    """One a client, who sends all its calls there."""
    keys: list[str]
    """One a client."""
    stream: bool
    seconds: float
    """How long new calls are begun. Each client makes at least one."""
    dialect: str = CHAT
    spread: float = 0.0
    """Seconds over which the clients' first calls are spread; 0: all at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the clients saw."""

    calls: int
    """Answered in full."""
    errors: dict[str, int]
    """Calls that were not, by cause."""
    seconds: float
    """From the first call's start to the last one's end."""
    p50_ms: float
    p99_ms: float
    events: int
    """Of all streams together."""
    all_open: float
    """Seconds for which every client's stream was open at once; 0 if that never was."""
    gap_p99_ms: float
    """Between two pieces of a stream."""


@dataclass(slots=True)
class Seen:
    """What all clients of one order see together."""

    order: Order
    deadline: float = 0.0
    latencies: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    events: int = 0
    last_opened: float = 0.0
    first_ended: float = float("inf")
    busy: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def done(self) -> None:
        self.busy -= 1
        if not self.busy:
            self.idle.set()

    def load(self, seconds: float) -> Load:
        return Load(
            calls=len(self.latencies),
            errors=dict(self.errors),
            seconds=seconds,
            p50_ms=percentile(self.latencies, 0.5) * 1e3,
            p99_ms=percentile(self.latencies, 0.99) * 1e3,
            events=self.events,
            all_open=max(0.0, self.first_ended - self.last_opened) if self.order.stream else 0.0,
            gap_p99_ms=percentile(self.gaps, 0.99) * 1e3,
        )


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


@dataclass(slots=True, eq=False)
class Client(asyncio.Protocol):
    request: bytes
    seen: Seen
    started: float = 0.0
    last_piece: float = 0.0
    tail: bytes = b""
    answering: bool = False
    transport: asyncio.Transport | None = None
    parser: httptools.HttpResponseParser | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.parser = cast("asyncio.Transport", transport), httptools.HttpResponseParser(self)

    def call(self) -> None:
        assert self.transport is not None
        self.started, self.last_piece, self.tail, self.answering = time.perf_counter(), 0.0, b"", True
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        assert self.parser is not None
        if self.seen.order.stream:
            now = time.perf_counter()
            if self.last_piece:
                self.seen.gaps.append(now - self.last_piece)
            else:
                self.seen.last_opened = now
            self.last_piece = now
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.seen.events += body.count(b"\n\n") + (self.tail[-1:] == body[:1] == b"\n")
        self.tail = (self.tail + body[-TAIL:])[-TAIL:]

    def on_message_complete(self) -> None:
        assert self.parser is not None
        now = time.perf_counter()
        self.seen.first_ended = min(self.seen.first_ended, now)
        status = self.parser.get_status_code()
        if status != 200:
            self.seen.errors[f"status {status}"] += 1
        elif self.seen.order.stream and not self.tail.endswith(SPOKEN[self.seen.order.dialect].ending):
            self.seen.errors["stream without its end"] += 1
        else:
            self.seen.latencies.append(now - self.started)
        self.answering = False
        if now < self.seen.deadline:
            self.call()
        else:
            self.seen.done()

    def connection_lost(self, failure: Exception | None) -> None:
        if self.answering:
            self.answering = False
            self.seen.errors["connection lost"] += 1
            self.seen.done()


async def obey(order: Order) -> Load:
    """Connect everyone first, then let all call."""
    seen = Seen(order)
    limit = asyncio.Semaphore(CONNECTING)

    async def connect(number: int) -> Client:
        async with limit:
            request = make_request(order, number)
            loop = asyncio.get_running_loop()
            return (await loop.create_connection(lambda: Client(request, seen), "127.0.0.1", order.port))[1]

    clients = await asyncio.gather(*map(connect, range(len(order.paths))))
    started = time.perf_counter()
    seen.deadline, seen.busy = started + order.seconds, len(clients)
    for number, client in enumerate(clients):
        asyncio.get_running_loop().call_later(order.spread * number / len(clients), client.call)
    await seen.idle.wait()
    load = seen.load(time.perf_counter() - started)
    for client in clients:
        assert client.transport is not None
        client.transport.close()
    return load


def make_request(order: Order, number: int) -> bytes:
    """What the client of that number sends, again and again."""
    body = SPOKEN[order.dialect].body(order.stream, f"agent-{number}")
    head = (
        f"POST {order.paths[number]} HTTP/1.1\r\nHost: 127.0.0.1:{order.port}\r\n"
        f"Authorization: Bearer {order.keys[number]}\r\n"
        f"Content-Type: application/json\r\nAccept: */*\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def main() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for line in sys.stdin:
        print(json.dumps(asdict(uvloop.run(obey(Order(**json.loads(line)))))), flush=True)


if __name__ == "__main__":
    main()
