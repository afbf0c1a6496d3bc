"""Spans on their way to a collector, over HTTP as OpenTelemetry sends them."""

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest
from stepwell.gateway.metrics import start


class Collector(BaseHTTPRequestHandler):
    received: ClassVar[list[tuple[str, bytes]]]

    def do_POST(self) -> None:
        self.received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bytes]]]:
    """Path and body of what the collector got that the environment names."""
    Collector.received = []
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield Collector.received
        server.shutdown()
        serving.join()


@pytest.fixture
def silent_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


async def test_spans_reach_the_collector_that_the_environment_names(received: list[tuple[str, bytes]]) -> None:
    tracing = start()
    assert tracing is not None
    tracing.record("chat", 0.0, None, {"trajectory_uid": "trajectory-1"})
    await tracing.close()
    ((path, body),) = received
    assert path == "/v1/traces"
    assert b"trajectory-1" in body
    assert b"stepwell-gateway" in body


@pytest.mark.usefixtures("silent_collector")
async def test_a_collector_that_never_answers_delays_neither_calls_nor_the_end() -> None:
    tracing = start(close_timeout=0.2)
    assert tracing is not None
    began = time.monotonic()
    for _ in range(3000):
        tracing.record("chat", 0.0, None, {"trajectory_uid": "t"})
    await tracing.close()
    assert time.monotonic() - began < 5
