"""One stream read directly from the engine, without a gateway: its bytes, its end, and its pace.

A gateway repairs much of this: it joins cut events, replaces bytes that are not UTF-8, and writes its own [DONE]. So
its records do not show these faults, but other clients of the engine, and proxies, meet them.
"""

import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import aiohttp

from stepwell.doctor.findings import Finding, Grade
from stepwell.engines.engine import BROKEN, failure_text
from stepwell.wire.openai import Upstream

TOKENS = 32
END = b"\n\n"
DONE = b"data: [DONE]"
REPAIRED = "the gateway repairs that; other clients may not"


@dataclass(frozen=True, slots=True)
class StreamPatience:
    """Seconds that an idle engine may take before the report warns."""

    first: float = 5.0
    """The seconds to the first token."""
    token: float = 0.5
    """Median time to each further token."""
    silence: float = 5.0
    """Longest time to any token."""


PATIENCE = StreamPatience()


@dataclass(slots=True)
class ReceivedStream:
    """The pieces that arrived, and when."""

    began: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    @property
    def is_cut(self) -> bool:
        """A piece ended inside an event."""
        return any(not piece.endswith(END) for _, piece in self.pieces[:-1])

    def gaps(self) -> list[tuple[float, int]]:
        """Seconds between two pieces, and the number of events before the gap."""
        events, gaps = 0, list[tuple[float, int]]()
        for (before, piece), (after, _) in pairwise(self.pieces):
            events += piece.count(END)
            gaps.append((after - before, events))
        return gaps


async def check_stream(
    http: aiohttp.ClientSession, engine: str, model: str, patience: StreamPatience = PATIENCE
) -> Finding:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Say hello, and how you are."}],
        "max_tokens": TOKENS,
        "seed": 7,
        "stream": True,
    }
    stream = ReceivedStream(time.monotonic())
    try:
        async with http.post(engine + Upstream.CHAT, json=body) as answer:
            while piece := await answer.content.readany():
                stream.pieces.append((time.monotonic(), piece))
    except (aiohttp.ClientError, *BROKEN) as failure:
        return Finding(Grade.FAULT, f"broke off after {len(stream.body)} bytes: {failure_text(failure)}", "see its log")
    if answer.status != 200:
        return Finding(Grade.FAULT, f"refused with {answer.status}: {stream.body[:200].decode(errors='replace')}")
    return judge(stream, patience)


def judge(stream: ReceivedStream, patience: StreamPatience) -> Finding:
    faults, warnings = _faults(stream), [*_slowness(stream, patience)]
    if stream.is_cut:
        warnings.append("events are cut inside lines or characters")
    if faults:
        return Finding(Grade.FAULT, "; ".join([*faults, *warnings]), REPAIRED)
    if warnings:
        return Finding(Grade.WARNING, "; ".join(warnings), REPAIRED if stream.is_cut else "is it busy, or far away?")
    first = stream.pieces[0][0] - stream.began
    return Finding(Grade.OK, f"complete; begins after {first:.2f} s")


def _faults(stream: ReceivedStream) -> list[str]:
    faults = []
    if DONE not in stream.body:
        faults.append("it ends without [DONE]")
    try:
        stream.body.decode()
    except UnicodeDecodeError as failure:
        faults.append(f"it has bytes that are not UTF-8 ({failure.object[failure.start : failure.end]!r})")
    return faults


def _slowness(stream: ReceivedStream, patience: StreamPatience) -> list[str]:
    if not stream.pieces:
        return ["it is empty"]
    found = []
    if (first := stream.pieces[0][0] - stream.began) > patience.first:
        found.append(f"nothing came for {first:.2f} s")
    gaps = stream.gaps()
    together = stream.body.count(END) - len(gaps)
    usual = median([gap for gap, _ in gaps] + [0.0] * max(1, together))
    if usual > patience.token:
        found.append(f"a token takes {usual:.2f} s")
    longest, events = max(gaps, default=(0.0, 0))
    if longest > max(patience.silence, 3 * usual):
        found.append(f"it was silent for {longest:.2f} s after {events} events")
    return found
