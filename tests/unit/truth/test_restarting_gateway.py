"""U: `connect(...).trajectory()` waits for a gateway that restarts, within a bound, and opens one trajectory."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import stepwell
from stepwell.errors import GatewayUnreachable


class RestartingGateway:
    """For each path it first ends the connection, then answers as a proxy does, and then as a gateway."""

    def __init__(self) -> None:
        self.url = ""
        self.calls: dict[str, list[Any]] = {}
        """The bodies that came to each path."""
        self.is_away = False
        """It answers no call at all."""


@pytest.fixture
def gateway() -> Iterator[RestartingGateway]:
    gateway = RestartingGateway()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            calls = gateway.calls.setdefault(self.path.rpartition("/")[2], [])
            calls.append(body)
            if gateway.is_away or len(calls) == 1:
                self.close_connection = True
            elif len(calls) == 2:
                self._answer(503, b"<html>no upstream</html>")
            else:
                root = f"{gateway.url}/{body.get('trajectory_uid')}/{body.get('prompt_uid')}/v1"
                self._answer(
                    200, json.dumps({**body, "base_url": root, "api_key": "-", "status": "completed"}).encode()
                )

        def _answer(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        gateway.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield gateway
        server.shutdown()


def test_both_ends_of_a_trajectory_wait_while_the_gateway_restarts(gateway: RestartingGateway) -> None:
    with stepwell.Run(gateway.url).trajectory(group_size=2) as t:
        t.reward = 1.0
    assert t.status == "completed"
    first, *others = gateway.calls["init_trajectory"]
    assert others == [first, first], "a repeated call names the same trajectory and prompt"
    assert (t.trajectory_uid, t.prompt_uid) == (first["trajectory_uid"], first["prompt_uid"])
    assert gateway.calls["complete_trajectory"] == [{"reward": 1.0}] * 3


def test_a_prompt_uid_of_the_caller_is_kept(gateway: RestartingGateway) -> None:
    with stepwell.Run(gateway.url).trajectory(prompt_uid="task-7") as t:
        pass
    assert t.prompt_uid == "task-7"


def test_the_wait_is_bounded(gateway: RestartingGateway) -> None:
    gateway.is_away = True
    run = stepwell.Run(gateway.url, patience=0.5)
    with pytest.raises(GatewayUnreachable, match="no gateway answers at"), run.trajectory():
        pass
    assert 1 < len(gateway.calls["init_trajectory"]) < 10
