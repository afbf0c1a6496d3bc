"""The clients: threads with a connection each, as an environment and a trainer have.

Arrow is sent as our own environments send it, each group under a name of its own; JSON as atroposlib does, unnamed.
"""

import http.client
import json
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"
PROBE_PAUSE = 0.002
TIMEOUT = 300.0


class Client:
    """One connection, kept."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = JSON, accept: str = JSON) -> bytes:
        named = {"Idempotency-Key": uuid4().hex} if kind == ARROW else {}
        self._connection.request(method, path, body, {"Content-Type": kind, "Accept": accept, **named})
        answer = self._connection.getresponse()
        content = answer.read()
        assert answer.status == 200, (method, path, answer.status, content[:1_000])
        return content

    def json(self, method: str, path: str, body: object = None) -> Any:
        return json.loads(self.ask(method, path, None if body is None else json.dumps(body).encode()))


def post_all(port: int, path: str, bodies: Iterable[bytes], *, kind: str = JSON, clients: int) -> None:
    """Every body once, by so many clients at the same time; each must be received, and as something new."""
    left, taking = iter(bodies), threading.Lock()

    def send() -> None:
        client = Client(port)
        while True:
            with taking:
                body = next(left, None)
            if body is None:
                return
            answer = json.loads(client.ask("POST", path, body, kind))
            assert answer["status"] == "received", answer
            assert not answer.get("duplicate"), answer

    with ThreadPoolExecutor(clients) as threads:
        for done in [threads.submit(send) for _ in range(clients)]:
            done.result()


@dataclass(slots=True)
class Probe:
    """Asks for an environment's status all the time, in a thread of its own."""

    port: int
    env_id: int
    latencies_ms: list[float] = field(default_factory=list)

    @contextmanager
    def asking(self) -> Iterator[None]:
        stop = threading.Event()
        thread = threading.Thread(target=self._ask, args=(stop,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _ask(self, stop: threading.Event) -> None:
        client, body = Client(self.port), json.dumps({"env_id": self.env_id}).encode()
        asked = False
        while not asked or not stop.wait(PROBE_PAUSE):
            begin = time.perf_counter()
            client.ask("GET", "/status-env", body)
            self.latencies_ms.append((time.perf_counter() - begin) * 1e3)
            asked = True
