"""What an engine tells about itself, and what that means for a run. The engine is probed as a gateway probes it."""

from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

import aiohttp

from stepwell.doctor.findings import Check, Finding, Grade
from stepwell.engines import ENGINES
from stepwell.engines.engine import BROKEN, EngineFacts, EngineHttp, EngineKind, probe_engine


@dataclass(frozen=True, slots=True)
class Probed:
    """An engine before the first call to it."""

    kind: EngineKind
    facts: EngineFacts
    weight_version: str | None
    is_paused: bool


async def probe(http: EngineHttp) -> Probed:
    """EngineUnavailable says what is wrong."""
    kind, facts = await probe_engine(http, ENGINES)
    await kind.check_health(http)
    return Probed(
        kind,
        facts,
        await kind.weight_version(http) if facts.weight_versions else None,
        bool(await kind.is_paused(http)) if facts.pause else False,
    )


def unreachable(why: str) -> Check:
    asks_key = why.endswith((" 401", " 403"))
    remedy = "give its key with --key" if asks_key else "is it up, and is this its address?"
    return Check("engine", Finding(Grade.FAULT, why, remedy))


def capability_checks(probed: Probed) -> list[Check]:
    facts = probed.facts
    window = f", {facts.max_model_len} tokens" if facts.max_model_len else ""
    return [
        Check("engine", _token_ids(probed)),
        Check("model", Finding(Grade.OK, f"{facts.model}{window}")),
        Check("generate", _generate(probed)),
        Check("pause", _pause(probed)),
        Check("weight version", _weight_version(probed)),
    ]


def weights_after(probed: Probed, after: str | None) -> Check | None:
    """None if the weights have the same version before and after the examination."""
    if after == probed.weight_version:
        return None
    what = f"changed from {probed.weight_version!r} to {after!r} while it was examined"
    return Check("weight version", Finding(Grade.FAULT, what, "examine it while no trainer syncs weights"))


async def key_check(engine: str, key: str | None) -> Check:
    """Whether it answers without a key."""
    try:
        async with aiohttp.ClientSession() as http, http.get(f"{engine}/v1/models", allow_redirects=False) as answer:
            is_open = answer.status == 200
    except (TimeoutError, *BROKEN):
        return Check("engine key", Finding(Grade.UNKNOWN, "the engine does not answer"))
    return Check("engine key", _key(engine, key, is_open))


def is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _token_ids(probed: Probed) -> Finding:
    facts = probed.facts
    if not facts.token_ids:
        return Finding(Grade.FAULT, f"{facts.label}: it gives no token ids", probed.kind.advice["token_ids"])
    if facts.tested:
        return Finding(Grade.WARNING, f"{facts.label}, which Stepwell was not tested with", f"tested: {facts.tested}")
    return Finding(Grade.OK, facts.label)


def _generate(probed: Probed) -> Finding:
    if probed.facts.generate:
        return Finding(Grade.OK, "can generate from token ids")
    what = "cannot generate from token ids: an answer that a weight update breaks off cannot be continued"
    return Finding(Grade.WARNING, what, probed.kind.advice["generate"])


def _pause(probed: Probed) -> Finding:
    if probed.is_paused:
        return Finding(Grade.FAULT, "the engine is paused, so it answers no call", probed.kind.advice["resume"])
    if probed.facts.pause:
        return Finding(Grade.OK, "can be paused for a weight update")
    return Finding(
        Grade.WARNING, "cannot be paused: a weight update would show in answers", probed.kind.advice["pause"]
    )


def _weight_version(probed: Probed) -> Finding:
    if probed.weight_version is None:
        what = "not told: steps get the pool's policy version"
        return Finding(Grade.WARNING, what, probed.kind.advice["weight_versions"])
    if probed.weight_version.isdecimal():
        return Finding(Grade.OK, probed.weight_version)
    return Finding(Grade.OK, f"{probed.weight_version!r}: not a number, so steps get the pool's until the first sync")


def _key(engine: str, key: str | None, is_open: bool) -> Finding:
    if not is_open:
        return Finding(Grade.OK, "required")
    if is_loopback(engine):
        return Finding(Grade.OK, "not required, on loopback" + (": --key is not needed" if key else ""))
    what = "the engine answers everyone who can reach it"
    return Finding(Grade.WARNING, what, "expose the gateway only; vLLM's control routes are open even with --api-key")
