"""A gateway: its parts joined to one ASGI application, and what runs beside its calls from its start to its end."""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Response

from stepwell.access.access_keys import AccessKeys
from stepwell.access.audit_log import AuditLog
from stepwell.access.route_table import BELOW_A_TRAJECTORY, TRAJECTORY_ROOT, RouteGuard
from stepwell.common.async_calls import running
from stepwell.common.listening import LOOPBACK_HOSTS, CrossSiteCheck, ServedHosts
from stepwell.common.tokenizers import BackgroundTokenizer
from stepwell.engines.discovery import EngineDiscovery
from stepwell.engines.fleet import EngineFleet
from stepwell.gateway import error_responses
from stepwell.gateway import metrics as tracing
from stepwell.gateway.agent_calls import MAX_IN_FLIGHT, AgentCalls, ChannelRouting, DialectContexts
from stepwell.gateway.asgi import AccessCheck, GatewayAsgi, MountedApp, access_table
from stepwell.gateway.bridge.bridge import RENDER_TIMEOUT, Bridge
from stepwell.gateway.bridge.recorded_turns import ThinkingPolicy
from stepwell.gateway.call_resolver import ASK_TIMEOUT, CallResolver
from stepwell.gateway.calls import SESSION_IDS, SessionIds
from stepwell.gateway.dialects import DIALECTS
from stepwell.gateway.dialects.chat_form import StepSeal
from stepwell.gateway.dialects.dialect import Dialect, DialectContext
from stepwell.gateway.dialects.request_rules import NO_MORE, RequestRules, SamplingPolicy
from stepwell.gateway.engine_answers import EngineAnswers
from stepwell.gateway.metrics import GatewayMetrics
from stepwell.gateway.recording.call_book import CallBook
from stepwell.gateway.recording.outbox import SETTLE_TIMEOUT, Outbox
from stepwell.gateway.recording.redaction import Redactor
from stepwell.gateway.recording.spool import Spool
from stepwell.gateway.recording.step_book import VersionConfirmer
from stepwell.gateway.recording.step_builder import StepBuilder
from stepwell.gateway.requests import CallQuota, CallQuotas
from stepwell.gateway.response_writer import SILENCE, KeepAlives
from stepwell.gateway.routes.operator_routes import (
    ReadinessCheck,
    openapi_document,
    operator_router,
    register_pool_readings,
    register_readings,
)
from stepwell.gateway.routes.trajectory_routes import FastRoutes, opening_router, trajectory_router
from stepwell.gateway.routes.whitebox_routes import whitebox_router
from stepwell.gateway.trajectory_lifecycle import TrajectoryLifecycle
from stepwell.pool.api.scoring import RewardScorer
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link import LinkClient
from stepwell.steps.trainable import LeftOutLog

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
DEFAULT_QUOTA = CallQuota()


@dataclass(eq=False, kw_only=True)
class GatewayApp:
    """What a gateway is made of, and what its operator has chosen. `asgi()` is the application."""

    pool: PoolClient
    link: LinkClient | None = None
    answers_unchecked: bool = True
    """Calls are answered also while the pool cannot be asked for their trajectory."""

    engines: EngineFleet
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Keeps the states of the engines up to date in place of their own watch."""
    discoveries: Sequence[EngineDiscovery] = ()
    bridge: ThinkingPolicy | None = None
    """None: engines render every prompt."""

    keys: AccessKeys
    audit: AuditLog | None = None
    hosts: ServedHosts | None = LOOPBACK_HOSTS
    """The names by which the gateway may be asked; None: any."""
    quota: CallQuota = DEFAULT_QUOTA
    rules: RequestRules = NO_MORE
    dialects: Sequence[Dialect] = DIALECTS

    prompt_length: int
    response_length: int
    sampling: Mapping[str, SamplingPolicy] = field(default_factory=dict)
    """By channel; calls of others are sampled as asked."""
    trained_model: str = ""
    other_models: Sequence[str] = ()
    """Agents may name the trained model and these only."""

    marked_side_calls: Collection[str] = ()
    """Channels in which the text of a prompt makes no side call."""
    session_sample: float = 1.0
    """The share of sessions that are recorded."""
    redactor: Redactor | None = None
    """Masks steps before they are stored."""
    spool: Spool | None = None
    is_durable: bool = False
    """Answers end only after the pool has confirmed their steps."""

    tokenizer: BackgroundTokenizer
    rewards: RewardScorer | None
    atropos: MountedApp | None = None
    limits: GatewayLimits = DEFAULT_LIMITS

    def __post_init__(self) -> None:
        self._metrics, self._traces = GatewayMetrics(), tracing.start()
        self._left_out = LeftOutLog(log, "; see --sampling in docs/gateway.md and --redact in docs/privacy.md")
        self._keep_alives = KeepAlives(self.limits.keep_alive_seconds)
        self._book = CallBook(self.pool)
        self.engines.share(self.pool)
        ids = SessionIds(self.keys.secrets(SESSION_IDS), self.session_sample)
        self._resolver = CallResolver(
            self.pool, ids, answers_unchecked=self.answers_unchecked, ask_timeout=self.limits.ask_timeout
        )
        self._steps = self._recording()
        self._outbox = self._steps.outbox
        self._calls = self._agent_calls()
        self._resolver.on_drop = self._calls.answers.drop_turns
        self._lifecycle = TrajectoryLifecycle(
            self.pool, self._outbox, self._resolver, self.keys, self._calls.quotas, self._metrics
        )
        self._readiness = ReadinessCheck(self.pool, self.engines, self.tokenizer, self.rewards, self.redactor)
        register_readings(self._metrics, self._calls, self.engines, self._outbox, self.spool)
        register_pool_readings(self._metrics, self._resolver, self.link)

    def asgi(self) -> GatewayAsgi:
        access = AccessCheck(RouteGuard(self.keys, self.audit), access_table(self.dialects))
        routed, cross_site = self._routed(), CrossSiteCheck(self.hosts)
        return GatewayAsgi(routed, self._calls, access, self.dialects, self.atropos, cross_site=cross_site)

    # -- what answers and records agents' calls ------------------------------------------------------------------------

    def _recording(self) -> StepBuilder:
        confirmer = VersionConfirmer(self.engines)
        outbox = Outbox(
            self.pool,
            on_refused=self._resolver.drop,
            calls=self._book,
            confirmer=confirmer,
            spool=self.spool,
            confirm_timeout=self.limits.confirm_timeout,
        )
        return StepBuilder(
            outbox=outbox,
            confirmer=confirmer,
            tokenizer=self.tokenizer,
            metrics=self._metrics,
            prompt_length=self.prompt_length,
            trained_model=self.trained_model,
            is_durable=self.is_durable,
            redactor=self.redactor,
        )

    def _agent_calls(self) -> AgentCalls:
        contexts = DialectContexts(
            around=DialectContext(self.response_length, seal=StepSeal(self.keys), rules=self.rules),
            sampling=self.sampling,
            trained_model=lambda: self.trained_model or self.engines.model,
            other_models=self.other_models,
        )
        return AgentCalls(
            resolver=self._resolver,
            contexts=contexts,
            channels=ChannelRouting(self.pool, self.engines.hold),
            answers=self._engine_answers(),
            metrics=self._metrics,
            tracing=self._traces,
            marked_side_calls=frozenset(self.marked_side_calls),
            max_in_flight=self.limits.max_in_flight,
            quotas=CallQuotas(self.quota),
        )

    def _engine_answers(self) -> EngineAnswers:
        bridge, timeout = None, self.limits.render_timeout
        if self.bridge is not None:
            bridge = Bridge(engines=self.engines, pool=self.pool, thinking=self.bridge, render_timeout=timeout)
        return EngineAnswers(
            pool=self.pool,
            engines=self.engines,
            resolver=self._resolver,
            steps=self._steps,
            book=self._book,
            metrics=self._metrics,
            left_out=self._left_out,
            keep_alives=self._keep_alives,
            bridge=bridge,
        )

    # -- the routes that are not agents' calls -------------------------------------------------------------------------

    def _routed(self) -> FastAPI:
        app = FastAPI(
            title="Stepwell gateway",
            lifespan=self._running,
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
            redirect_slashes=False,
        )
        error_responses.install(app)
        app.include_router(operator_router(self.engines, self._readiness, self._metrics))
        app.add_middleware(FastRoutes, self._lifecycle)
        app.include_router(opening_router(self._lifecycle, self.pool, self.engines))
        app.include_router(
            whitebox_router(
                self.pool,
                self.engines,
                self.tokenizer,
                self.rewards,
                self._metrics,
                self._left_out,
                self._steps.redact_submitted,
                prompt_length=self.prompt_length,
                response_length=self.response_length,
                trained_model=self.trained_model,
            )
        )
        below = trajectory_router(self._lifecycle, self.engines)
        for prefix in BELOW_A_TRAJECTORY:
            app.include_router(below, prefix=TRAJECTORY_ROOT + prefix, include_in_schema=prefix == "/v1")

        @app.get("/openapi.json", include_in_schema=False)
        async def openapi() -> Response:
            return Response(openapi_document(app.openapi(), self.dialects), media_type=error_responses.JSON)

        return app

    # -- what runs beside the calls ------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _running(self, _: object) -> AsyncIterator[None]:
        """Open while the gateway serves. At the end the last steps are delivered."""
        self.tokenizer.start()
        try:
            async with (
                self.engines,
                running(*self._works()),
                self.atropos.running() if self.atropos else nullcontext(),
            ):
                yield
                await self._outbox.drain(self.limits.drain_timeout)
                if not self._outbox.waiting:
                    await self.pool.stop_serving()
        finally:
            if self._traces is not None:
                await self._traces.close()
            if self.spool is not None:
                self.spool.close()

    def _works(self) -> list[Coroutine[Any, Any, None]]:
        spooled_by = self.spool.gateway if self.spool is not None else ""
        return [
            (self.watch or self.engines.watch)(),
            self.engines.follow(),
            *(one.run() for one in self.discoveries),
            self._outbox.run(),
            self.pool.follow(),
            self.pool.follow_flushes(self._lifecycle.flush, self._book.held, spooled_by),
            self._readiness.announce(),
            self._resolver.run(),
            self._keep_alives.run(),
            self._metrics.watch_loop(),
            *((self.redactor.run(),) if self.redactor is not None else ()),
        ]
