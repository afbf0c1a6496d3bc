"""Traces: one span per call, sent to an OpenTelemetry collector.

- A collector that fails or hangs delays no call: spans wait in a bounded queue and are dropped beyond it.
- The tracer provider is this gateway's own. With the process-wide one, FastAPI would begin to trace too.
- A span is made when its call is over: it is never the current one, and a stream may end in another task.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from stepwell.common.imports import install_command

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger("stepwell.gateway")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""OpenTelemetry's variables for the collector's address. Its others (headers, sampler, …) count too."""
SERVICE = "stepwell-gateway"
"""The service's name, unless OTEL_SERVICE_NAME gives another."""
CLOSE_TIMEOUT = 5.0
"""Seconds in which the last spans are sent or given up."""

Attributes: TypeAlias = Mapping[str, str | int]


class Tracing:
    """Spans of one provider, which is closed with it."""

    def __init__(self, provider: "TracerProvider", close_timeout: float = CLOSE_TIMEOUT) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._close_timeout = close_timeout
        self._tracer = provider.get_tracer("stepwell")
        self._kind = SpanKind.SERVER
        self._extract = TraceContextTextMapPropagator().extract

    def record(
        self, name: str, started_at: float, traceparent: bytes | None = None, attributes: Attributes | None = None
    ) -> None:
        """A call that is over, below the caller's own span if a traceparent header names it."""
        parent = self._extract({"traceparent": traceparent.decode("latin-1")}) if traceparent else None
        self._tracer.start_span(name, parent, self._kind, attributes, start_time=int(started_at * 1e9)).end()

    async def close(self) -> None:
        """Send the last spans, or give them up after the timeout."""
        ending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, self._close_timeout)


def start(close_timeout: float = CLOSE_TIMEOUT) -> Tracing | None:
    """Tracing, if the environment variables ask for it. The caller closes it."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    try:
        provider = _exporting()
    except ImportError:
        log.warning("traces need an extra package: %s", install_command("otel"))
        return None
    return Tracing(provider, close_timeout)


def _exporting() -> "TracerProvider":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource({"service.name": SERVICE}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
