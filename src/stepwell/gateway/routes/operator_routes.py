"""Routes for the operator: health, readiness, metrics, engines, and the OpenAPI document, which is FastAPI's own,
completed by the model calls, which FastAPI does not serve.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Response

from stepwell.access.route_table import ROOTS, TRAJECTORY_ROOT, UNRECORDED_ROOTS
from stepwell.common.tokenizers import BackgroundTokenizer
from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replica import EngineState
from stepwell.errors import WEIGHTS, StepwellError
from stepwell.gateway.agent_calls import AgentCalls
from stepwell.gateway.dialects.dialect import PLACE, Dialect, TokenCounter
from stepwell.gateway.metrics import GatewayMetrics, Reading
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
TEXT: dict[str, Any] = {"type": "string"}
ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {"message": TEXT, "type": TEXT, "param": {}, "code": {}},
        }
    },
}
UIDS: list[dict[str, Any]] = [
    {"name": name, "in": "path", "required": True, "schema": TEXT} for name in ("trajectory_uid", "prompt_uid")
]
CALL_HEADERS = {
    "Idempotency-Key": "Calls of one trajectory that carry the same key are one call, and one step.",
    "x-stepwell-capture": "off, with a control key or a runner's key: the call is answered and not recorded.",
    "x-stepwell-call": "task or side, with a control key: whether this call belongs to the task.",
}


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
    metrics: GatewayMetrics,
    calls: AgentCalls,
    engines: EngineFleet,
    outbox: Outbox,
    spool: Spool | None = None,
    link: LinkClient | None = None,
) -> None:
    """Show values that other objects hold; they are read when /metrics is."""
    gauge, counter = metrics.read_from, partial(metrics.read_from, kind="counter")
    gauge("stepwell_in_flight", "Agents' calls in flight.", (), _one(lambda: calls.in_flight))
    text = "Calls refused because a quota was used up."
    counter("stepwell_quota_refused", text, ("quota",), _each(lambda: calls.quotas.refused))
    text = "Kept answers that a call with their Idempotency-Key does not get any more."
    counter("stepwell_kept_answers_dropped", text, ("cause",), _each(lambda: calls.deduplicator.dropped))
    text = "Answers that ended before the pool knew of their call: it was away, or did not answer within 2 s."
    counter("stepwell_unannounced_answers", text, (), _one(lambda: calls.answers.book.unannounced))
    _register_engine_readings(metrics, engines)
    gauge("stepwell_waiting_steps", "Steps on their way to the pool.", (), _one(lambda: outbox.waiting))
    gauge("stepwell_waiting_bytes", "Their size.", (), _one(lambda: outbox.waiting_bytes))
    text = "Steps the pool has answered for."
    counter("stepwell_delivered_steps", text, ("verdict",), _each(lambda: outbox.delivered))
    counter("stepwell_lost_steps", "Steps that did not get into the pool.", ("cause",), _each(lambda: outbox.lost))
    text = "Recorded steps of which the pool was told that they are unseen, read and so on."
    counter("stepwell_step_marks", text, ("mark",), _each(lambda: outbox.marks.told))
    text = "Recorded steps of which the pool could not be told it."
    counter("stepwell_step_marks_lost", text, ("cause",), _each(lambda: outbox.marks.lost))
    if spool is not None:
        text = "Steps that the spool's disk did not take."
        counter("stepwell_spool_unwritten_steps", text, (), _one(lambda: spool.unwritten))
        text = "Steps in memory that the spool's disk has not taken yet."
        gauge("stepwell_spool_pending_steps", text, (), _one(lambda: spool.pending))
    text = "Calls answered although the pool could not be asked for their trajectory."
    counter("stepwell_unchecked_calls", text, (), _one(lambda: calls.resolver.unchecked))
    if link is not None:
        gauge("stepwell_ray_joined", "1 while Ray is joined.", (), _one(lambda: link.is_joined))
        text = "How often the process that joins Ray was started."
        counter("stepwell_ray_link_starts", text, (), _one(lambda: link.starts))


def _register_engine_readings(metrics: GatewayMetrics, engines: EngineFleet) -> None:
    def states() -> Iterator[tuple[tuple[str, ...], float]]:
        for engine in engines.replicas:
            for state in EngineState:
                yield (engine.address, state), float(engine.state is state)

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

    gauge, counter = metrics.read_from, partial(metrics.read_from, kind="counter")
    gauge("stepwell_engine_state", "1 for the state an engine is in.", ("engine", "state"), states)
    loads = _each(lambda: {engine.address: engine.in_flight for engine in engines.replicas})
    gauge("stepwell_engine_in_flight", "Calls in flight at an engine.", ("engine",), loads)
    gauge("stepwell_served_version", "Policy version that sessions get, by side.", ("side",), versions)
    gauge("stepwell_canary_share", "Share of the sessions that a canary gets.", (), _one(share))
    text = "How long the canary has been without a decision; 0 without one."
    gauge("stepwell_canary_seconds", text, (), _one(seconds))
    text = "Calls while there is a canary, by the side of their session."
    counter("stepwell_canary_calls", text, ("side",), _each(lambda: engines.split_counts.calls))
    text = "Calls that the other side answered, because no engine of their session's side did."
    counter("stepwell_canary_served_by_other", text, ("side",), _each(lambda: engines.split_counts.served_by_other))


def _one(read: Callable[[], float]) -> Callable[[], Reading]:
    """A value without labels."""
    return lambda: [((), read())]


def _each(read: Callable[[], Mapping[str, float]]) -> Callable[[], Reading]:
    """The values of a mapping, by the one label that is its key."""
    return lambda: [((str(label),), value) for label, value in read().items()]


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


def openapi_document(schema: dict[str, Any], dialects: Iterable[Dialect]) -> bytes:
    """FastAPI's own document, with the agents' calls, keys and errors."""
    dialects = tuple(dialects)
    calls = [(dialect, path) for dialect in dialects for path in dialect.paths]
    counters = [dialect.token_counter for dialect in dialects if dialect.token_counter is not None]
    in_trajectory, in_session, unrecorded = f"{TRAJECTORY_ROOT}/v1", ROOTS[0], UNRECORDED_ROOTS[0]
    made = [
        *((in_trajectory, path, _operation(dialect, path)) for dialect, path in calls),
        *((in_session, path, _session_operation(dialect, path)) for dialect, path in calls),
        *((unrecorded, path, _unrecorded_operation(dialect, path)) for dialect, path in calls),
        *((in_trajectory, one.path, _count_operation(one, UIDS)) for one in counters),
        *((in_session, one.path, _count_operation(one, [])) for one in counters),
    ]
    paths = {**schema["paths"], **{f"{root}/{_shown(path)}": {"post": operation} for root, path, operation in made}}
    for path_item in paths.values():
        for operation in path_item.values():
            operation["responses"].pop("422", None)
            operation["responses"]["4XX"] = {"description": "Refused, with the reason", "content": json_content(ERROR)}
    components = dict(schema.get("components", {}))
    headers = {dialect.key_header.decode() for dialect in dialects} - {"authorization"}
    components["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer"},
        **{name: {"type": "apiKey", "in": "header", "name": name} for name in sorted(headers)},
    }
    return orjson.dumps({**schema, "paths": paths, "components": components, "security": [{"key": []}]})


def json_content(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _shown(path: str) -> str:
    """A path template as OpenAPI writes it."""
    return PLACE.sub(r"{\1}", path)


def _names(path: str) -> list[dict[str, Any]]:
    """The parameters that a path template names."""
    return [{"name": place[1], "in": "path", "required": True, "schema": TEXT} for place in PLACE.finditer(path)]


def _of_url(dialect: Dialect, path: str) -> list[dict[str, Any]]:
    """The parameters of a call's own URL."""
    return [*_names(path), *({"name": name, "in": "query", "schema": what} for name, what in dialect.query.items())]


def _operation(dialect: Dialect, path: str) -> dict[str, Any]:
    headers = [
        {"name": name, "in": "header", "schema": TEXT, "description": text} for name, text in CALL_HEADERS.items()
    ]
    answers: dict[str, Any] = {
        "200": {
            "description": "The answer; server-sent events where stream is true",
            "content": {**json_content({"type": "object"}), "text/event-stream": {"schema": TEXT}},
        }
    }
    name = dialect.summary if path == dialect.paths[0] else f"{dialect.summary} {path}"
    return {
        "summary": dialect.summary,
        "description": dialect.description,
        "operationId": re.sub(r"\W", "_", name.lower()),
        "parameters": [*UIDS, *_of_url(dialect, path), *headers],
        "requestBody": {"required": True, "content": json_content(dialect.request_schema)},
        "responses": answers,
    }


def _session_operation(dialect: Dialect, path: str) -> dict[str, Any]:
    """The same without uids: the key and the conversation name the session."""
    operation = _operation(dialect, path)
    text = (
        "The name of the conversation; without it, it is told by what the messages continue. With the key of a runner "
        "or an operator it may name a trajectory, as `trajectory_uid/prompt_uid`."
    )
    header = {"name": "x-session-id", "in": "header", "schema": TEXT, "description": text}
    return {
        **operation,
        "summary": f"{dialect.summary}, of a session",
        "operationId": f"session_{operation['operationId']}",
        "parameters": [*operation["parameters"][len(UIDS) :], header],
    }


def _unrecorded_operation(dialect: Dialect, path: str) -> dict[str, Any]:
    operation = _operation(dialect, path)
    return {
        "summary": f"{dialect.summary}, unrecorded",
        "description": dialect.unrecorded_description,
        "operationId": re.sub(r"\W", "_", f"unrecorded_{path}"),
        **({"parameters": told} if (told := _of_url(dialect, path)) else {}),
        "requestBody": operation["requestBody"],
        "responses": operation["responses"],
    }


def _count_operation(counter: TokenCounter, uids: list[dict[str, Any]]) -> dict[str, Any]:
    where = "" if uids else "session_"
    return {
        "summary": counter.summary,
        "description": "An engine renders the prompt. Nothing is generated and nothing is recorded.",
        "operationId": re.sub(r"\W", "_", where + counter.path),
        "parameters": [*uids, *_names(counter.path)],
        "requestBody": {"required": True, "content": json_content(counter.request_schema)},
        "responses": {"200": {"description": "The number of tokens", "content": json_content({"type": "object"})}},
    }
