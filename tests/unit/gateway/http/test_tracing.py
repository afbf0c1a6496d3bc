import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from stepwell.common.imports import install_command
from stepwell.gateway.metrics import Tracing, start

from stepwell.gateway import metrics as module

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


def test_a_span_has_the_time_and_the_attributes_of_its_call(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    attributes: dict[str, str | int] = {"trajectory_uid": "t", "engine": "http://e:1", "response_tokens": 3}
    tracing.record("chat", 1000.5, None, attributes)
    (done,) = exporter.get_finished_spans()
    assert (done.name, done.kind, done.parent, done.start_time) == ("chat", SpanKind.SERVER, None, 1_000_500_000_000)
    assert done.end_time is not None
    assert done.end_time > 1_000_500_000_000
    assert dict(done.attributes or {}) == attributes


def test_a_span_stands_below_the_one_the_caller_names(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    tracing.record("chat", 0.0, f"00-{TRACE}-{CALLER}-01".encode())
    (done,) = exporter.get_finished_spans()
    assert done.parent is not None
    assert (f"{done.parent.trace_id:032x}", f"{done.parent.span_id:016x}") == (TRACE, CALLER)


@pytest.mark.parametrize("header", [None, b"", b"\xff\xfe", b"00-0-0-01", b"nonsense"])
def test_a_traceparent_that_cannot_be_read_begins_a_trace(
    tracing: Tracing, exporter: InMemorySpanExporter, header: bytes | None
) -> None:
    tracing.record("chat", 0.0, header)
    assert exporter.get_finished_spans()[0].parent is None


def test_without_a_collector_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in module.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert start() is None


def test_a_collector_without_the_extra_is_said_to_need_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert start() is None
    assert install_command("otel") in caplog.text


async def test_the_last_spans_are_sent_before_the_end(exporter: InMemorySpanExporter) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracing = Tracing(provider)
    tracing.record("chat", 0.0)
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
