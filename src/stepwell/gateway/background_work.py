"""The work that runs beside the calls, from the gateway's start to its end."""

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from stepwell.common.async_calls import running
from stepwell.common.tokenizers import BackgroundTokenizer
from stepwell.engines.discovery import EngineDiscovery
from stepwell.engines.fleet import EngineFleet
from stepwell.gateway.call_book import CallBook
from stepwell.gateway.call_resolver import CallResolver
from stepwell.gateway.http.metrics import GatewayMetrics
from stepwell.gateway.http.response_writer import KeepAlives
from stepwell.gateway.http.tracing import Tracing
from stepwell.gateway.recording.outbox import Outbox
from stepwell.gateway.recording.redactor import Redactor
from stepwell.gateway.recording.spool import Spool
from stepwell.gateway.routes.asgi import MountedApp
from stepwell.gateway.routes.operator_routes import ReadinessCheck
from stepwell.gateway.trajectory_lifecycle import TrajectoryLifecycle
from stepwell.pool.api.ports import StepSink


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundWork:
    pool: StepSink
    engines: EngineFleet
    watch: Callable[[], Coroutine[Any, Any, None]] | None
    """Keeps the states of the engines up to date in place of their own."""
    discoveries: Sequence[EngineDiscovery]
    tokenizer: BackgroundTokenizer
    calls: CallBook
    outbox: Outbox
    lifecycle: TrajectoryLifecycle
    readiness: ReadinessCheck
    resolver: CallResolver
    keep_alives: KeepAlives
    metrics: GatewayMetrics
    traces: Tracing | None
    spool: Spool | None
    redactor: Redactor | None
    atropos: MountedApp | None
    drain_timeout: float
    """Seconds in which the pool must take the last steps."""

    @contextlib.asynccontextmanager
    async def running(self, _: object = None) -> AsyncIterator[None]:
        """Open while the gateway serves. At the end the last steps are delivered."""
        self.tokenizer.start()
        try:
            async with (
                self.engines,
                running(*self._works()),
                self.atropos.running() if self.atropos else nullcontext(),
            ):
                yield
                await self.outbox.drain(self.drain_timeout)
                if not self.outbox.waiting:
                    await self.pool.stop_serving()
        finally:
            if self.traces is not None:
                await self.traces.close()
            if self.spool is not None:
                self.spool.close()

    def _works(self) -> list[Coroutine[Any, Any, None]]:
        return [
            (self.watch or self.engines.watch)(),
            self.engines.follow(),
            *(one.run() for one in self.discoveries),
            self.outbox.run(),
            self.pool.follow(),
            self.pool.follow_flushes(
                self.lifecycle.flush, self.calls.held, self.spool.gateway if self.spool is not None else ""
            ),
            self.readiness.announce(),
            self.resolver.run(),
            self.keep_alives.run(),
            self.metrics.watch_loop(),
            *((self.redactor.run(),) if self.redactor is not None else ()),
        ]
