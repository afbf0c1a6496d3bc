"""Traces: one span per call, sent to an OpenTelemetry collector.

- Without the extra or without a collector's address, a span is one shared object that does nothing.
- A collector that fails or hangs delays no call: spans wait in a bounded queue and are dropped beyond it.
- The tracer provider is this gateway's own. With the process-wide one, FastAPI would begin to trace too.
- A span is never made the current one: a stream's span ends in another task than it began in.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger("stepwell.gateway")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""OpenTelemetry's variables for the collector's address. Its others (headers, sampler, …) count too."""
SERVICE = "stepwell-gateway"
"""The service's name, unless OTEL_SERVICE_NAME gives another."""
CLOSE_TIMEOUT = 5.0
"""Seconds in which the last spans are sent or given up."""

Attribute: TypeAlias = str | bool | int | float | Sequence[str]


class Span(Protocol):
    """The part of an OpenTelemetry span that the gateway uses. It records an exception that leaves its `with`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        return

    def set_attributes(self, attributes: Mapping[str, Attribute]) -> None:
        return


class NoSpan(Span):
    """Records nothing."""

    __slots__ = ()


NO_SPAN = NoSpan()


class NoTracing:
    """Nothing is traced."""

    def span(self, name: str, traceparent: bytes | None = None, **attributes: Attribute) -> Span:
        return NO_SPAN

    async def close(self) -> None: ...


class Tracing(NoTracing):
    """Spans of one provider, which is closed with it."""

    def __init__(self, provider: "TracerProvider", close_timeout: float = CLOSE_TIMEOUT) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._close_timeout = close_timeout
        self._tracer = provider.get_tracer("stepwell")
        self._kind = SpanKind.SERVER
        self._extract = TraceContextTextMapPropagator().extract

    def span(self, name: str, traceparent: bytes | None = None, **attributes: Attribute) -> Span:
        """A span that begins now, below the caller's own if a traceparent header names it."""
        parent = self._extract({"traceparent": traceparent.decode("latin-1")}) if traceparent else None
        return self._tracer.start_span(name, parent, self._kind, attributes)

    async def close(self) -> None:
        """Send the last spans, or give them up after the timeout."""
        ending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, self._close_timeout)


def start(close_timeout: float = CLOSE_TIMEOUT) -> NoTracing:
    """Tracing as the environment variables ask for it. The caller closes it."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return NoTracing()
    try:
        provider = _exporting()
    except ImportError:
        log.warning("traces need an extra package: pip install 'stepwell[otel]'")
        return NoTracing()
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
