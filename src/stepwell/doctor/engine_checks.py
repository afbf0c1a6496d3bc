"""Checks of an engine's own report, and what that means for a run. The engine is probed as a gateway probes it."""

from ipaddress import ip_address
from urllib.parse import urlsplit

import aiohttp

from stepwell.doctor.findings import Check, Finding, Grade
from stepwell.engines.capabilities import COSTS
from stepwell.engines.engine import BROKEN
from stepwell.engines.replica import EngineReplica, EngineState


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
        async with aiohttp.ClientSession() as http, http.get(f"{engine}/v1/models", allow_redirects=False) as answer:
            is_open = answer.status == 200
    except (aiohttp.ClientError, *BROKEN):
        return Check("engine key", Finding(Grade.UNKNOWN, "the engine does not answer"))
    return Check("engine key", _key(engine, key, is_open))


def is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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


def _key(engine: str, key: str | None, is_open: bool) -> Finding:
    if not is_open:
        return Finding(Grade.OK, "required")
    if is_loopback(engine):
        return Finding(Grade.OK, "not required, on loopback" + (": --key is not needed" if key else ""))
    what = "the engine answers everyone who can reach it"
    return Finding(Grade.WARNING, what, "expose the gateway only; vLLM's control routes are open even with --api-key")
