"""An engine that only sends: vLLM's answers, prepared as bytes, so that what is measured is never the engine.

Streams go out at once, or, with a gap, chunk by chunk from one timer for all of them. `PUT /rig/pace` sets the gap and
the length of the streams to come, `GET /rig/sent` counts.

    python -m benchmarks.gateway_rig.engine --port 9000
"""

import argparse
import asyncio
import re
import resource
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import cycle
from typing import cast

import httptools
import orjson
import uvloop

from benchmarks.gateway_rig import canned
from rig.fake_engine.asking import Json

SLOTS = 20
"""Moments within a gap at which streams are served, as those of so many engines would be, each with its own rhythm."""
STREAMED = re.compile(rb'"stream":\s*true')
CHAT = b"/v1/chat/completions"
FACTS: dict[bytes, Json] = {
    b"/health": {},
    b"/version": {"version": "0.32.0"},
    b"/v1/models": {
        "object": "list",
        "data": [{"id": canned.MODEL, "object": "model", "owned_by": "vllm", "max_model_len": 32_768}],
    },
    b"/is_paused": {"is_paused": False},
    b"/weight_info": {"weight_version": "default"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How streams are sent."""

    gap: float = 0.0
    """Seconds between two chunks; 0: all at once."""
    chunks: int = canned.CHUNKS


@dataclass(slots=True)
class Sent:
    calls: int = 0
    """Answered to the end."""
    tokens: int = 0


def response(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def http_chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


class Streams:
    """The prepared parts of a stream."""

    HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.opening = self.HEAD + http_chunk(canned.event(canned.opening()))
        self.middle = [http_chunk(canned.event(canned.chunk(n))) for n in range(canned.CHUNKS)]
        last = canned.event(canned.chunk(chunks - 1, last=True))
        ending = (last, canned.event(canned.closing(chunks)), canned.DONE, b"")
        self.ending = b"".join(http_chunk(part) for part in ending)

    def at(self, number: int) -> bytes:
        return self.middle[number % canned.CHUNKS] if number < self.chunks - 1 else self.ending

    def whole(self) -> bytes:
        return self.opening + b"".join(self.at(number) for number in range(self.chunks))


@dataclass(slots=True)
class SlowStream:
    transport: asyncio.Transport
    finish: Callable[[int], None]
    number: int = 0


class Wheel:
    """One timer for all slow streams: each is served once a gap, in the slot that it was dealt."""

    def __init__(self, streams: Streams, gap: float) -> None:
        self._streams, self._tick = streams, gap / SLOTS
        self._slots: list[list[SlowStream]] = [[] for _ in range(SLOTS)]
        self._deal, self._turn = cycle(self._slots), cycle(range(SLOTS))
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.time()
        self._timer = self._loop.call_soon(self._serve)

    def add(self, stream: SlowStream) -> None:
        stream.transport.write(self._streams.opening)
        next(self._deal).append(stream)

    def stop(self) -> None:
        self._timer.cancel()

    def _serve(self) -> None:
        slot = next(self._turn)
        self._slots[slot][:] = [stream for stream in self._slots[slot] if self._goes_on(stream)]
        self._next += self._tick
        self._timer = self._loop.call_at(self._next, self._serve)

    def _goes_on(self, stream: SlowStream) -> bool:
        if stream.transport.is_closing():
            return False
        stream.transport.write(self._streams.at(stream.number))
        stream.number += 1
        if stream.number == self._streams.chunks:
            stream.finish(self._streams.chunks * canned.A_CHUNK)
        return stream.number < self._streams.chunks


class Engine:
    def __init__(self) -> None:
        self.sent = Sent()
        self.whole = response(orjson.dumps(canned.whole()))
        self.facts = {path: response(orjson.dumps(fact)) for path, fact in FACTS.items()}
        self.wheel: Wheel | None = None
        self.set_pace(Pace())

    def set_pace(self, pace: Pace) -> None:
        if self.wheel is not None:
            self.wheel.stop()
        streams = Streams(pace.chunks)
        self.wheel = Wheel(streams, pace.gap) if pace.gap else None
        self.stream, self.stream_tokens = streams.whole(), pace.chunks * canned.A_CHUNK

    def answer(self, path: bytes, body: bytes, transport: asyncio.Transport) -> None:
        if path == CHAT:
            self._chat(body, transport)
        elif path == b"/rig/pace":
            self.set_pace(Pace(**orjson.loads(body)))
            transport.write(response(b"{}"))
        elif path == b"/rig/sent":
            transport.write(response(orjson.dumps(asdict(self.sent))))
        else:
            transport.write(self.facts.get(path) or response(b'{"detail":"Not Found"}', "404 Not Found"))

    def _chat(self, body: bytes, transport: asyncio.Transport) -> None:
        if not STREAMED.search(body):
            transport.write(self.whole)
            self._count(canned.RESPONSE)
        elif self.wheel is not None:
            self.wheel.add(SlowStream(transport, self._count))
        else:
            transport.write(self.stream)
            self._count(self.stream_tokens)

    def _count(self, tokens: int) -> None:
        self.sent.calls += 1
        self.sent.tokens += tokens


@dataclass(slots=True, eq=False)
class Connection(asyncio.Protocol):
    engine: Engine
    path: bytes = b""
    body: list[bytes] = field(default_factory=list)
    transport: asyncio.Transport | None = None
    parser: httptools.HttpRequestParser | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.parser = cast("asyncio.Transport", transport), httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        assert self.parser is not None
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.path = url

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        assert self.transport is not None
        body = b"".join(self.body)
        self.body.clear()
        self.engine.answer(self.path, body, self.transport)


async def serve(port: int) -> None:
    engine = Engine()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(engine), "127.0.0.1", port, backlog=4_096
    )
    await server.serve_forever()


def main() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
