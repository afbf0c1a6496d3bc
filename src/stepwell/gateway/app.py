"""Builds the gateway's ASGI application from its parts."""

import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Response

from stepwell.access.access_keys import AccessKeys
from stepwell.access.audit_log import AuditLog
from stepwell.access.route_guard import RouteGuard
from stepwell.access.route_table import BELOW_A_TRAJECTORY, TRAJECTORY_ROOT
from stepwell.common.cross_site import CrossSiteCheck
from stepwell.common.listening import LOOPBACK_HOSTS, ServedHosts
from stepwell.common.tokenizers import BackgroundTokenizer
from stepwell.engines.discovery import EngineDiscovery
from stepwell.engines.fleet import EngineFleet
from stepwell.gateway.agent_calls import MAX_IN_FLIGHT, AgentCalls
from stepwell.gateway.background_work import BackgroundWork
from stepwell.gateway.bridge.bridge import RENDER_TIMEOUT, Bridge
from stepwell.gateway.bridge.thinking import ThinkingPolicy
from stepwell.gateway.call_book import CallBook
from stepwell.gateway.call_placement import SESSION_IDS, CallPlacement, SessionIds
from stepwell.gateway.conversations import Conversations
from stepwell.gateway.dialects import DIALECTS
from stepwell.gateway.dialects.dialect import CallSurroundings, Dialect
from stepwell.gateway.dialects.request_fields import NO_MORE, RequestRules
from stepwell.gateway.dialects.request_sampling import SamplingPolicy
from stepwell.gateway.dialects.step_seal import StepSeal
from stepwell.gateway.http import error_responses, tracing
from stepwell.gateway.http.metrics import GatewayMetrics
from stepwell.gateway.http.quotas import CallQuota, CallQuotas
from stepwell.gateway.http.response_writer import SILENCE, KeepAlives
from stepwell.gateway.live_sessions import LiveSessions
from stepwell.gateway.recording.outbox import SETTLE_TIMEOUT, Outbox
from stepwell.gateway.recording.redactor import Redactor
from stepwell.gateway.recording.spool import Spool
from stepwell.gateway.recording.step_builder import StepBuilder
from stepwell.gateway.recording.version_confirmer import VersionConfirmer
from stepwell.gateway.routes.access import AccessCheck, access_table
from stepwell.gateway.routes.asgi import GatewayAsgi, MountedApp
from stepwell.gateway.routes.fast_routes import FastRoutes
from stepwell.gateway.routes.openapi import openapi_document
from stepwell.gateway.routes.operator_routes import (
    ReadinessCheck,
    operator_router,
    register_pool_readings,
    register_readings,
)
from stepwell.gateway.routes.trajectory_routes import opening_router, trajectory_router
from stepwell.gateway.routes.whitebox_routes import whitebox_router
from stepwell.gateway.token_counts import TokenCounts
from stepwell.gateway.trajectories import ASK_TIMEOUT, KnownTrajectories
from stepwell.gateway.trajectory_lifecycle import TrajectoryLifecycle
from stepwell.pool.api.scoring import RewardScorer
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link import LinkClient
from stepwell.steps.sampling import LeftOutLog

log = logging.getLogger("stepwell.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """Bounds and time-outs that are not settings of an operator."""

    keep_alive_seconds: float = SILENCE
    max_in_flight: int = MAX_IN_FLIGHT
    confirm_timeout: float = SETTLE_TIMEOUT
    """Seconds in which the pool must confirm a step before its answer ends."""
    ask_timeout: float = ASK_TIMEOUT
    """Seconds that a call waits for the pool to confirm its trajectory, before it is answered unchecked."""
    drain_timeout: float = 30.0
    """Seconds in which the pool must take the last steps when the gateway ends."""
    render_timeout: float = RENDER_TIMEOUT
    """Seconds in which engines must render what a bridged call needs, before they get its messages instead."""


DEFAULT_LIMITS = GatewayLimits()
NO_CHOICE = CallQuota()


def create_app(
    *,
    pool: PoolClient,
    engines: EngineFleet,
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None,
    discoveries: Sequence[EngineDiscovery] = (),
    tokenizer: BackgroundTokenizer,
    rewards: RewardScorer | None,
    prompt_length: int,
    response_length: int,
    keys: AccessKeys,
    audit: AuditLog | None = None,
    spool: Spool | None = None,
    is_durable: bool = False,
    atropos: MountedApp | None = None,
    sampling: Mapping[str, SamplingPolicy] = MappingProxyType({}),
    link: LinkClient | None = None,
    answers_unchecked: bool = True,
    trained_model: str = "",
    other_models: Sequence[str] = (),
    marked_side_calls: Collection[str] = (),
    bridge: ThinkingPolicy | None = None,
    session_sample: float = 1.0,
    rules: RequestRules = NO_MORE,
    quota: CallQuota = NO_CHOICE,
    redactor: Redactor | None = None,
    hosts: ServedHosts | None = LOOPBACK_HOSTS,
    dialects: Sequence[Dialect] = DIALECTS,
    limits: GatewayLimits = DEFAULT_LIMITS,
) -> GatewayAsgi:
    """`sampling` is by channel; AS_ASKED for others. Agents may name `trained_model` and `other_models` only.
    In the channels `marked_side_calls`, the text of a prompt makes no side call.

    `watch` keeps the states of the engines up to date in place of their own. With `answers_unchecked`, calls are
    answered also while the pool cannot be asked for their trajectory. `session_sample` is the share of
    sessions that are recorded. Without `bridge`, engines render every prompt. The redactor masks steps before they are
    stored. `hosts` are the names by which it may be asked; None: any.
    """
    metrics, traces = GatewayMetrics(), tracing.start()
    left_out = LeftOutLog(log, "; see --sampling in docs/gateway.md and --redact in docs/privacy.md")
    engines.share(pool)
    known = KnownTrajectories(pool, answers_unchecked=answers_unchecked, ask_timeout=limits.ask_timeout)
    sessions = LiveSessions(pool, known, answers_unchecked=answers_unchecked, ask_timeout=limits.ask_timeout)
    ids = SessionIds(keys.secrets(SESSION_IDS))
    placement = CallPlacement(known, sessions, Conversations(pool), session_sample, ids)
    confirmer = VersionConfirmer(engines)
    book = CallBook(pool)
    outbox = Outbox(
        pool,
        on_refused=known.drop,
        calls=book,
        confirmer=confirmer,
        spool=spool,
        confirm_timeout=limits.confirm_timeout,
    )
    readiness = ReadinessCheck(pool, engines, tokenizer, rewards, redactor)
    steps = StepBuilder(
        outbox=outbox,
        confirmer=confirmer,
        tokenizer=tokenizer,
        metrics=metrics,
        prompt_length=prompt_length,
        trained_model=trained_model,
        is_durable=is_durable,
        redactor=redactor,
    )
    bridges = None
    if bridge is not None:
        bridges = Bridge(engines=engines, pool=pool, thinking=bridge, render_timeout=limits.render_timeout)
    keep_alives = KeepAlives(limits.keep_alive_seconds)
    calls = AgentCalls(
        pool=pool,
        engines=engines,
        known=known,
        placement=placement,
        steps=steps,
        metrics=metrics,
        tracing=traces,
        around=CallSurroundings(response_length, seal=StepSeal(keys), rules=rules),
        sampling=sampling,
        other_models=other_models,
        marked_side_calls=frozenset(marked_side_calls),
        left_out=left_out,
        keep_alives=keep_alives,
        bridge=bridges,
        max_in_flight=limits.max_in_flight,
        quotas=CallQuotas(quota),
        book=book,
    )

    def drop_turns(trajectory_uid: str) -> None:
        calls.stored.drop(trajectory_uid)
        if bridges is not None:
            bridges.turns.drop(trajectory_uid)

    known.on_drop = drop_turns
    register_readings(metrics, calls, engines, outbox, spool)
    register_pool_readings(metrics, known, link)
    lifecycle = TrajectoryLifecycle(pool, outbox, known, keys, sessions, placement, calls.quotas, metrics)

    work = BackgroundWork(
        pool=pool,
        engines=engines,
        watch=watch,
        discoveries=discoveries,
        tokenizer=tokenizer,
        calls=book,
        outbox=outbox,
        lifecycle=lifecycle,
        readiness=readiness,
        sessions=sessions,
        keep_alives=keep_alives,
        metrics=metrics,
        traces=traces,
        spool=spool,
        redactor=redactor,
        atropos=atropos,
        drain_timeout=limits.drain_timeout,
    )
    app = FastAPI(
        title="Stepwell gateway",
        lifespan=work.running,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    error_responses.install(app)
    app.include_router(operator_router(engines, readiness, metrics))
    app.add_middleware(FastRoutes, lifecycle)
    app.include_router(opening_router(lifecycle, pool, engines))
    app.include_router(
        whitebox_router(
            pool,
            engines,
            tokenizer,
            rewards,
            metrics,
            left_out,
            steps.redact_submitted,
            prompt_length=prompt_length,
            response_length=response_length,
            trained_model=trained_model,
        )
    )
    below = trajectory_router(lifecycle, engines)
    for prefix in BELOW_A_TRAJECTORY:
        app.include_router(below, prefix=TRAJECTORY_ROOT + prefix, include_in_schema=prefix == "/v1")

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(openapi_document(app.openapi(), dialects), media_type=error_responses.JSON)

    access, counts = AccessCheck(RouteGuard(keys, audit), access_table(dialects)), TokenCounts(calls)
    return GatewayAsgi(app, calls, counts, access, dialects, atropos, cross_site=CrossSiteCheck(hosts))
