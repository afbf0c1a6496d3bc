"""Routes for the operator: health, readiness, metrics and engines."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Response

from stepwell.common.tokenizers import BackgroundTokenizer
from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replica import EngineState
from stepwell.errors import WEIGHTS, StepwellError
from stepwell.gateway.agent_calls import AgentCalls
from stepwell.gateway.call_resolver import CallResolver
from stepwell.gateway.metrics import GatewayMetrics
from stepwell.gateway.recording.outbox import Outbox
from stepwell.gateway.recording.redaction import Redactor
from stepwell.gateway.recording.spool import Spool
from stepwell.pool.api.scoring import RewardScorer
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link import LinkClient
from stepwell.wire import gateway_api

log = logging.getLogger("stepwell.gateway")

READY_INTERVAL = 1.0
"""Seconds between two checks whether everything is ready."""


@dataclass(frozen=True, slots=True)
class ReadinessCheck:
    """A check of what this gateway still lacks, for /ready and for the log."""

    pool: PoolClient
    engines: EngineFleet
    tokenizer: BackgroundTokenizer
    rewards: RewardScorer | None
    redactor: Redactor | None = None

    async def missing(self) -> dict[str, str]:
        """The reason for each part that is not ready: tokenizer, data_pool, engines, weights, reward_worker,
        redaction."""
        parts = {
            "tokenizer": self.tokenizer.why_not_ready(),
            "data_pool": await _why_not(self.pool),
            "engines": self._why_no_engine(),
            WEIGHTS: self.engines.why_stuck(),
            "reward_worker": None if self.rewards is None else await _why_not(self.rewards),
            "redaction": None if self.redactor is None else self.redactor.why_not_ready(),
        }
        return {part: why for part, why in parts.items() if why is not None}

    async def announce(self) -> None:
        """Log each missing part once, until nothing is missing."""
        logged: dict[str, str] = {}
        while missing := await self.missing():
            for part, why in missing.items():
                if logged.get(part) != why:
                    log.warning("waiting for %s: %s", part, why)
            logged = missing
            await asyncio.sleep(READY_INTERVAL)
        log.info("ready")

    def _why_no_engine(self) -> str | None:
        """A paused or unsynced engine counts as ready: a call to it waits. But first the pool must have told whether
        somebody brings it weights."""
        engines = self.engines.replicas
        if any(engine.state in (EngineState.HEALTHY, EngineState.PAUSED) for engine in engines):
            return None
        if any(engine.state is EngineState.UNSYNCED for engine in engines):
            asked = "the pool has not told yet whether a trainer syncs their weights"
            return asked if self.engines.is_sync_expected is None else None
        return "; ".join(f"{engine.address}: {engine.why}" for engine in engines) or "there is none"


async def _why_not(part: PoolClient | RewardScorer) -> str | None:
    try:
        await part.check()
    except StepwellError as failure:
        return str(failure)
    return None


def operator_router(engines: EngineFleet, readiness: ReadinessCheck, metrics: GatewayMetrics) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Answers while the process lives."""
        return {"status": "ok"}

    @router.get("/ready", responses={503: {"model": gateway_api.Readiness}})
    async def ready(response: Response) -> gateway_api.Readiness:
        """503 until the tokenizer, the pool, an engine and, if they were named, the reward worker and the redaction
        function are there; and while all engines wait for weights that nobody brings."""
        missing = await readiness.missing()
        response.status_code = 503 if missing else 200
        return gateway_api.Readiness(ready=not missing, missing=missing)

    @router.get("/metrics", name="metrics")
    async def metrics_text() -> Response:
        """The gateway's counts, for Prometheus."""
        body, content_type = metrics.exposition()
        return Response(body, media_type=content_type)

    @router.post("/forget")
    async def forget(wanted: gateway_api.ForgetSubject) -> gateway_api.ForgetReceipt:
        """Delete everything of one person, for good, and record no more of it; or delete all that is too old. It can be
        repeated."""
        return gateway_api.ForgetReceipt(**await readiness.pool.forget(wanted.subject, wanted.older_than or 0.0))

    @router.get("/engines")
    async def engines_now() -> gateway_api.EngineList:
        """The engines and how they are."""
        return _listed(engines)

    @router.post("/engines")
    async def add_engine(wanted: gateway_api.EngineAddress) -> gateway_api.EngineList:
        """Use one engine more, from now on, in all gateways of the pool and in the weight sync."""
        await engines.join(wanted.address)
        return _listed(engines)

    @router.delete("/engines")
    async def remove_engine(address: Annotated[gateway_api.Address, Query()]) -> gateway_api.EngineList:
        """Send no more calls to an engine, from any gateway of the pool; those in flight there go on to their end."""
        await engines.leave(address)
        return _listed(engines)

    return router


def register_readings(
    metrics: GatewayMetrics, calls: AgentCalls, engines: EngineFleet, outbox: Outbox, spool: Spool | None
) -> None:
    """Show values that other objects hold; they are read when /metrics is."""

    def states() -> Iterator[tuple[tuple[str, ...], float]]:
        for engine in engines.replicas:
            for state in EngineState:
                yield (engine.address, state), float(engine.state is state)

    def loads() -> Iterator[tuple[tuple[str, ...], float]]:
        return (((engine.address,), engine.in_flight) for engine in engines.replicas)

    def counts(counter: Counter[str]) -> Iterator[tuple[tuple[str, ...], float]]:
        return (((str(label),), count) for label, count in counter.items())

    gauge, counter = metrics.read_from, partial(metrics.read_from, kind="counter")
    gauge("stepwell_in_flight", "Agents' calls in flight.", (), lambda: [((), calls.in_flight)])
    text = "Calls refused because a quota was used up."
    counter("stepwell_quota_refused", text, ("quota",), lambda: counts(calls.quotas.refused))
    text = "Kept answers that a call with their Idempotency-Key does not get any more."
    counter("stepwell_kept_answers_dropped", text, ("cause",), lambda: counts(calls.deduplicator.dropped))
    text = "Answers that ended before the pool knew of their call: it was away, or did not answer within 2 s."
    counter("stepwell_unannounced_answers", text, (), lambda: [((), calls.answers.book.unannounced)])
    gauge("stepwell_engine_state", "1 for the state an engine is in.", ("engine", "state"), states)
    gauge("stepwell_engine_in_flight", "Calls in flight at an engine.", ("engine",), loads)
    _register_canary_readings(metrics, engines)
    gauge("stepwell_waiting_steps", "Steps on their way to the pool.", (), lambda: [((), outbox.waiting)])
    gauge("stepwell_waiting_bytes", "Their size.", (), lambda: [((), outbox.waiting_bytes)])
    counter(
        "stepwell_delivered_steps", "Steps the pool has answered for.", ("verdict",), lambda: counts(outbox.delivered)
    )
    counter("stepwell_lost_steps", "Steps that did not get into the pool.", ("cause",), lambda: counts(outbox.lost))
    text = "Recorded steps of which the pool was told that they are unseen, read and so on."
    counter("stepwell_step_marks", text, ("mark",), lambda: counts(outbox.marks.told))
    text = "Recorded steps of which the pool could not be told it."
    counter("stepwell_step_marks_lost", text, ("cause",), lambda: counts(outbox.marks.lost))
    if spool is not None:
        text = "Steps that the spool's disk did not take."
        counter("stepwell_spool_unwritten_steps", text, (), lambda: [((), spool.unwritten)])
        text = "Steps in memory that the spool's disk has not taken yet."
        gauge("stepwell_spool_pending_steps", text, (), lambda: [((), spool.pending)])


def _register_canary_readings(metrics: GatewayMetrics, engines: EngineFleet) -> None:
    def versions() -> Iterator[tuple[tuple[str, ...], float]]:
        serving = engines.serving
        if serving is not None:
            yield ("stable",), serving.policy_version
            if serving.canary is not None:
                yield ("canary",), serving.canary.version

    def share() -> float:
        canary = engines.serving and engines.serving.canary
        return canary.share if canary else 0.0

    def seconds() -> float:
        canary = engines.serving and engines.serving.canary
        return max(0.0, time.time() - canary.began_at) if canary else 0.0

    def counted(counter: Counter[str]) -> Iterator[tuple[tuple[str, ...], float]]:
        return (((side,), count) for side, count in counter.items())

    metrics.read_from("stepwell_served_version", "Policy version that sessions get, by side.", ("side",), versions)
    metrics.read_from("stepwell_canary_share", "Share of the sessions that a canary gets.", (), lambda: [((), share())])
    text = "How long the canary has been without a decision; 0 without one."
    metrics.read_from("stepwell_canary_seconds", text, (), lambda: [((), seconds())])
    text = "Calls while there is a canary, by the side of their session."
    metrics.read_from(
        "stepwell_canary_calls", text, ("side",), lambda: counted(engines.split_counts.calls), kind="counter"
    )
    text = "Calls that the other side answered, because no engine of their session's side did."
    metrics.read_from(
        "stepwell_canary_served_by_other",
        text,
        ("side",),
        lambda: counted(engines.split_counts.served_by_other),
        kind="counter",
    )


def register_pool_readings(metrics: GatewayMetrics, resolver: CallResolver, link: LinkClient | None) -> None:
    """Show how this gateway gets along without the pool."""
    text = "Calls answered although the pool could not be asked for their trajectory."
    metrics.read_from("stepwell_unchecked_calls", text, (), lambda: [((), resolver.unchecked)], kind="counter")
    if link is not None:
        metrics.read_from("stepwell_ray_joined", "1 while Ray is joined.", (), lambda: [((), link.is_joined)])
        text = "How often the process that joins Ray was started."
        metrics.read_from("stepwell_ray_link_starts", text, (), lambda: [((), link.starts)], kind="counter")


def _listed(engines: EngineFleet) -> gateway_api.EngineList:
    return gateway_api.EngineList(
        engines=[
            gateway_api.EngineNow(
                address=engine.address,
                state=engine.state,
                why=engine.why,
                in_flight=engine.in_flight,
                weight_version=engine.weight_version,
                server=engine.facts.server_version,
            )
            for engine in engines.replicas
        ]
    )
