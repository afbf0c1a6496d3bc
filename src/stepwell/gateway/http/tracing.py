"""Traces, for those who collect them: one span a call, sent to an OpenTelemetry collector.

What always holds: without the extra or without a collector's address a span is one shared object that does nothing; a
collector that fails or hangs delays no call (spans wait in a bounded queue and are dropped beyond it). The tracer
provider is this gateway's own, not the process-wide one, at which FastAPI would begin to trace as well; and a span is
never made the current one, since it may end in another task than it began in, as a stream's does.
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
"""Where OpenTelemetry's own variables say the collector is; its others (headers, sampler, …) are obeyed too."""
SERVICE = "stepwell-gateway"
"""The service's name, unless OTEL_SERVICE_NAME gives another."""
CLOSE_TIMEOUT = 5.0
"""Seconds the last spans may take to be sent."""

Attribute: TypeAlias = str | bool | int | float | Sequence[str]


class Span(Protocol):
    """What the gateway does with an OpenTelemetry span. An exception that leaves the `with` is noted in it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None: ...

    def set_attributes(self, attributes: Mapping[str, Attribute]) -> None: ...


class NoSpan:
    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None: ...

    def set_attributes(self, attributes: Mapping[str, Attribute]) -> None: ...


NO_SPAN = NoSpan()


class NoTracing:
    """Nothing is traced."""

    def span(self, name: str, traceparent: bytes | None = None, **attributes: Attribute) -> Span:
        return NO_SPAN

    async def close(self) -> None: ...


class Tracing(NoTracing):
    """Spans of one provider, which ends with it."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("stepwell")
        self._kind = SpanKind.SERVER
        self._extract = TraceContextTextMapPropagator().extract

    def span(self, name: str, traceparent: bytes | None = None, **attributes: Attribute) -> Span:
        """A span that begins now, below the caller's own where a traceparent header names it."""
        parent = self._extract({"traceparent": traceparent.decode("latin-1")}) if traceparent else None
        return self._tracer.start_span(name, parent, self._kind, attributes)

    async def close(self) -> None:
        """Send what is left, or give it up after CLOSE_TIMEOUT."""
        ending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, CLOSE_TIMEOUT)


def start() -> NoTracing:
    """Tracing as the environment asks for it. Close what you get."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return NoTracing()
    try:
        provider = _exporting()
    except ImportError:
        log.warning("a collector for traces is set, but not the means to reach it: pip install 'stepwell[otel]'")
        return NoTracing()
    return Tracing(provider)


def _exporting() -> "TracerProvider":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource({"service.name": SERVICE}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
