"""Checks of the engine itself: its own report, and the bytes, the end and the pace of one stream.

- The engine is probed as a gateway probes it.
- The stream is read directly from the engine. A gateway repairs much of it: it joins cut events, replaces bytes that
  are not UTF-8, and writes its own [DONE]. So its records do not show these faults, but other clients meet them.
"""

import time
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from urllib.parse import urlsplit

import aiohttp

from stepwell.common.listening import is_loopback
from stepwell.doctor.findings import Check, Finding, Grade
from stepwell.engines.capabilities import COSTS
from stepwell.engines.connections import EngineConnections
from stepwell.engines.engine import BROKEN, EngineHttp, failure_text
from stepwell.engines.replica import EngineReplica, EngineState
from stepwell.errors import EngineUnavailable
from stepwell.wire.openai import Upstream

TOKENS = 32
END = b"\n\n"
DONE = b"data: [DONE]"
REPAIRED = "the gateway repairs that; other clients may not"


def unreachable(why: str) -> Check:
    asks_key = why.endswith((" 401", " 403"))
    remedy = "give its key with --key" if asks_key else "is it up, and is this its address?"
    return Check("engine", Finding(Grade.FAULT, why, remedy))


def capability_checks(engine: EngineReplica, weights_before: str | None) -> list[Check]:
    """`weights_before`: the version of its weights before the examination; None if it did not tell it in time."""
    facts = engine.facts
    window = f", {facts.max_model_len} tokens" if facts.max_model_len else ""
    return [
        Check("engine", _token_ids(engine)),
        Check("model", Finding(Grade.OK, f"{facts.model}{window}")),
        Check("generate", _generate(engine)),
        Check("pause", _pause(engine)),
        Check("weight version", _weight_version(engine, weights_before)),
    ]


async def key_check(engine: str, key: str | None) -> Check:
    """Checks whether the engine answers without a key."""
    try:
        with closing(EngineConnections()) as connections:
            status, _ = await EngineHttp(connections, engine).ask("/v1/models")
    except EngineUnavailable:
        return Check("engine key", Finding(Grade.UNKNOWN, "the engine does not answer"))
    if status != 200:
        return Check("engine key", Finding(Grade.OK, "required"))
    if is_loopback(urlsplit(engine).hostname or ""):
        what = "not required, on loopback" + (": --key is not needed" if key else "")
        return Check("engine key", Finding(Grade.OK, what))
    remedy = "expose the gateway only; vLLM's control routes are open even with --api-key"
    return Check("engine key", Finding(Grade.WARNING, "the engine answers everyone who can reach it", remedy))


def _token_ids(engine: EngineReplica) -> Finding:
    facts = engine.facts
    if not facts.token_ids:
        return Finding(Grade.FAULT, f"{facts.label}: {COSTS['token_ids']}", engine.kind.advice["token_ids"])
    note = f"; Stepwell's tests use {facts.tested}, and this one is judged by what it does" if facts.tested else ""
    return Finding(Grade.OK, facts.label + note)


def _generate(engine: EngineReplica) -> Finding:
    if engine.facts.generate:
        return Finding(Grade.OK, "can generate from token ids")
    return Finding(Grade.WARNING, COSTS["generate"], engine.kind.advice["generate"])


def _pause(engine: EngineReplica) -> Finding:
    if engine.state is EngineState.PAUSED:
        return Finding(Grade.FAULT, "the engine is paused, so it answers no call", engine.kind.advice["resume"])
    if engine.facts.pause:
        return Finding(Grade.OK, "can be paused for a weight update")
    return Finding(Grade.WARNING, COSTS["weight_versions"], engine.kind.advice["pause"])


def _weight_version(engine: EngineReplica, before: str | None) -> Finding:
    if before is not None and engine.weight_version != before:
        what = f"changed from {before!r} to {engine.weight_version!r} while it was examined"
        return Finding(Grade.FAULT, what, "examine it while no trainer syncs weights")
    if engine.weight_version is None:
        what = "not told: it gets no calls after the first policy version"
        return Finding(Grade.WARNING, what, engine.kind.advice["weight_versions"])
    if engine.weight_version.isdecimal():
        return Finding(Grade.OK, engine.weight_version)
    return Finding(
        Grade.OK,
        f"{engine.weight_version!r}: not a number, so it gets no calls between the first policy version and a sync",
    )


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
