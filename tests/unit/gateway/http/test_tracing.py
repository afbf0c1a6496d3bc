import asyncio
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from stepwell.errors import EngineUnavailable
from stepwell.gateway.http import tracing as module
from stepwell.gateway.http.tracing import NO_SPAN, NoTracing, Tracing, start

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Tracing:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider)


def test_a_span_carries_what_is_known_at_its_start_and_at_its_end(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    with tracing.span("chat", trajectory_uid="t", prompt_uid="p") as span:
        span.set_attributes({"engine": "http://e:1", "response_tokens": 3, "finish_reasons": ["stop", "length"]})
    (done,) = exporter.get_finished_spans()
    assert (done.name, done.kind, done.parent) == ("chat", SpanKind.SERVER, None)
    assert dict(done.attributes or {}) == {
        "trajectory_uid": "t",
        "prompt_uid": "p",
        "engine": "http://e:1",
        "response_tokens": 3,
        "finish_reasons": ("stop", "length"),
    }


def test_a_span_stands_below_the_one_the_caller_names(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    with tracing.span("chat", f"00-{TRACE}-{CALLER}-01".encode()):
        pass
    (done,) = exporter.get_finished_spans()
    assert done.parent is not None
    assert (f"{done.parent.trace_id:032x}", f"{done.parent.span_id:016x}") == (TRACE, CALLER)


@pytest.mark.parametrize("header", [None, b"", b"\xff\xfe", b"00-0-0-01", b"nonsense"])
def test_a_traceparent_that_cannot_be_read_begins_a_trace(
    tracing: Tracing, exporter: InMemorySpanExporter, header: bytes | None
) -> None:
    with tracing.span("chat", header):
        pass
    assert exporter.get_finished_spans()[0].parent is None


def test_a_failure_is_noted_and_goes_on(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    with pytest.raises(EngineUnavailable), tracing.span("chat"):
        raise EngineUnavailable("gone")
    (done,) = exporter.get_finished_spans()
    assert done.status.status_code is StatusCode.ERROR
    assert done.status.description == "EngineUnavailable: gone"


async def test_a_span_may_end_in_another_task(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    span = tracing.span("chat").__enter__()
    await asyncio.create_task(asyncio.to_thread(span.__exit__, None, None, None))
    assert len(exporter.get_finished_spans()) == 1


async def test_without_a_collector_a_span_is_one_shared_object_that_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in module.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    tracing = start()
    with tracing.span("chat", b"nonsense", trajectory_uid="t") as span:
        span.set_attributes({"engine": "e"})
    assert span is NO_SPAN
    assert tracing.span("generate") is NO_SPAN
    await tracing.close()


def test_a_collector_without_the_extra_is_said_to_need_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert type(start()) is NoTracing
    assert "pip install 'stepwell[otel]'" in caplog.text


async def test_the_last_spans_are_sent_before_the_end(exporter: InMemorySpanExporter) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracing = Tracing(provider)
    with tracing.span("chat"):
        pass
    await tracing.close()
    assert len(exporter.get_finished_spans()) == 1


@pytest.mark.parametrize(("environment", "name"), [({}, "stepwell-gateway"), ({"OTEL_SERVICE_NAME": "mine"}, "mine")])
async def test_the_service_has_a_name_which_the_environment_may_change(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], name: str
) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    provider = module._exporting()
    assert provider.resource.attributes["service.name"] == name
    await Tracing(provider).close()
