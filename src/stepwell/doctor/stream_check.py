"""One stream as it comes from the engine, with no gateway between: its bytes, its end, and its pace.

A gateway mends much of this (it puts cut events together, replaces bytes that are no UTF-8, writes its own [DONE]), so
what it records cannot show it; other clients of the engine, and proxies, do not.
"""

import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import aiohttp

from stepwell.doctor.findings import Finding, Mark
from stepwell.engines.engine import BROKEN, explained

CHAT = "/v1/chat/completions"
TOKENS = 32
END = b"\n\n"
DONE = b"data: [DONE]"
MENDED = "the gateway puts that right; other clients may not"


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that an idle engine may take; beyond, its reader is told."""

    first: float = 5.0
    """For the first token."""
    token: float = 0.5
    """For each further one, as a rule."""
    silence: float = 5.0
    """For any of them."""


PATIENCE = Patience()


@dataclass(slots=True)
class Stream:
    """What came, and when."""

    began: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    @property
    def is_cut(self) -> bool:
        """A piece ended within an event."""
        return any(not piece.endswith(END) for _, piece in self.pieces[:-1])

    def gaps(self) -> list[tuple[float, int]]:
        """Seconds between two pieces, and how many events had come by then."""
        came, found = 0, list[tuple[float, int]]()
        for (before, piece), (after, _) in pairwise(self.pieces):
            came += piece.count(END)
            found.append((after - before, came))
        return found


async def check_stream(http: aiohttp.ClientSession, engine: str, model: str, patience: Patience = PATIENCE) -> Finding:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Say hello, and how you are."}],
        "max_tokens": TOKENS,
        "seed": 7,
        "stream": True,
    }
    stream = Stream(time.monotonic())
    try:
        async with http.post(engine + CHAT, json=body) as answer:
            while piece := await answer.content.readany():
                stream.pieces.append((time.monotonic(), piece))
    except (TimeoutError, *BROKEN) as failure:
        return Finding(Mark.FAULT, f"broke off after {len(stream.body)} bytes: {explained(failure)}", "see its log")
    if answer.status != 200:
        return Finding(Mark.FAULT, f"refused with {answer.status}: {stream.body[:200].decode(errors='replace')}")
    return judge(stream, patience)


def judge(stream: Stream, patience: Patience) -> Finding:
    faults, warnings = _faults(stream), [*_slowness(stream, patience)]
    if stream.is_cut:
        warnings.append("events come in pieces, cut within lines or characters")
    if faults:
        return Finding(Mark.FAULT, "; ".join([*faults, *warnings]), MENDED)
    if warnings:
        return Finding(Mark.WARNING, "; ".join(warnings), MENDED if stream.is_cut else "is it busy, or far away?")
    first = stream.pieces[0][0] - stream.began
    return Finding(Mark.OK, f"whole; begins after {first:.2f} s")


def _faults(stream: Stream) -> list[str]:
    faults = []
    if DONE not in stream.body:
        faults.append("it ends without [DONE]")
    try:
        stream.body.decode()
    except UnicodeDecodeError as failure:
        faults.append(f"it has bytes that are no UTF-8 ({failure.object[failure.start : failure.end]!r})")
    return faults


def _slowness(stream: Stream, patience: Patience) -> list[str]:
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
    longest, came = max(gaps, default=(0.0, 0))
    if longest > max(patience.silence, 3 * usual):
        found.append(f"it was silent for {longest:.2f} s after {came} events")
    return found
