"""What an engine says of itself, and what that means for a run. Asked directly, as a gateway probes it."""

from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

import aiohttp

from stepwell.doctor.findings import Check, Finding, Grade
from stepwell.engines.engine import BROKEN, TESTED, EngineFacts, EngineProbe
from stepwell.engines.vllm_generate import GENERATE

DEV_MODE = "start vLLM with VLLM_SERVER_DEV_MODE=1"


@dataclass(frozen=True, slots=True)
class Probed:
    """An engine as it was found, before it was asked to write anything."""

    facts: EngineFacts
    weight_version: str | None
    is_paused: bool


async def probe(questions: EngineProbe) -> Probed:
    """EngineUnavailable says what is wrong."""
    facts = await questions.facts()
    await questions.check_health(facts)
    return Probed(
        facts,
        await questions.weight_version() if facts.weight_info else None,
        bool(await questions.is_paused()) if facts.pause else False,
    )


def unreachable(why: str) -> Check:
    asks_key = why.endswith((" 401", " 403"))
    remedy = "give its key with --key" if asks_key else "is it up, and is this its address?"
    return Check("engine", Finding(Grade.FAULT, why, remedy))


def capability_checks(probed: Probed) -> list[Check]:
    can = probed.facts
    window = f", {can.max_model_len} tokens" if can.max_model_len else ""
    return [
        Check("engine", _server(can)),
        Check("model", Finding(Grade.OK, f"{can.model}{window}")),
        Check("generate", _generate(can)),
        Check("pause", _pause(probed)),
        Check("weight version", _weights(probed)),
    ]


def weights_after(probed: Probed, after: str | None) -> Check | None:
    """Where the weights are others after the examination than before it."""
    if after == probed.weight_version:
        return None
    what = f"changed from {probed.weight_version!r} to {after!r} while it was examined"
    return Check("weight version", Finding(Grade.FAULT, what, "examine it while no trainer syncs weights"))


async def key_check(engine: str, key: str | None) -> Check:
    """Whether it answers those who have no key."""
    try:
        async with aiohttp.ClientSession() as http, http.get(f"{engine}/v1/models", allow_redirects=False) as answer:
            is_open = answer.status == 200
    except (TimeoutError, *BROKEN):
        return Check("engine key", Finding(Grade.UNKNOWN, "could not be found out"))
    return Check("engine key", _key(engine, key, is_open))


def is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _server(can: EngineFacts) -> Finding:
    if not can.server:
        what = "a plain OpenAI server, or one that hides its version: it gives no token ids"
        return Finding(Grade.FAULT, what, "use vLLM; steps are only retokenized here, and left out of batches")
    if not can.token_ids:
        return Finding(Grade.FAULT, f"version {can.server} is too old to give token ids", "use vLLM 0.11 or newer")
    if not can.server.startswith(TESTED):
        return Finding(Grade.WARNING, f"vLLM {can.server}, which Stepwell was not tested with", f"tested: {TESTED[0]}")
    return Finding(Grade.OK, f"vLLM {can.server}")


def _generate(can: EngineFacts) -> Finding:
    if can.generate:
        return Finding(Grade.OK, f"{GENERATE} is open")
    what = f"{GENERATE} is closed: an answer that a weight update breaks off cannot be carried on"
    return Finding(Grade.WARNING, what, "start vLLM with --enable-scale-out")


def _pause(probed: Probed) -> Finding:
    if probed.is_paused:
        return Finding(Grade.FAULT, "the engine is paused, so it answers no call", "POST /resume, or wait for the sync")
    if probed.facts.pause:
        return Finding(Grade.OK, "can be paused for a weight update")
    return Finding(Grade.WARNING, "cannot be paused: a weight update would show in answers", DEV_MODE)


def _weights(probed: Probed) -> Finding:
    if probed.weight_version is None:
        return Finding(Grade.WARNING, "not told: steps get the pool's policy version", DEV_MODE)
    if probed.weight_version.isdecimal():
        return Finding(Grade.OK, probed.weight_version)
    return Finding(Grade.OK, f"{probed.weight_version!r}: no number, so steps get the pool's until the first sync")


def _key(engine: str, key: str | None, is_open: bool) -> Finding:
    if not is_open:
        return Finding(Grade.OK, "asked for")
    if is_loopback(engine):
        return Finding(Grade.OK, "none asked for, on loopback" + (": --key is not needed" if key else ""))
    what = "the engine answers everyone who can reach it"
    return Finding(Grade.WARNING, what, "expose the gateway only; vLLM's control routes are open even with --api-key")
