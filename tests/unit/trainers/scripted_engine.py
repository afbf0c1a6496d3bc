"""An engine that notes what it is asked and answers as it is told: vLLM's control routes without a model."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

E = TypeVar("E", bound="ScriptedEngine")


class ScriptedEngine:
    def __init__(self) -> None:
        self.url = ""
        self.calls: list[str] = []
        """The paths, in the order in which they were asked for."""
        self.bodies: dict[str, Any] = {}
        """The last body that each path got."""
        self.keys: set[str | None] = set()
        self.is_paused = False
        self.was_paused_at: dict[str, bool] = {}
        self.weight_version = "default"
        self.logprobs: list[float] = []
        """What it says of the probe, but for its first token."""
        self.fails_at: str | None = None
        self.empties_cache = True
        self.keeps_version = False
        """Takes a new version and goes on telling the old one."""
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.slow_answers = 0
        """So many questions for its version it does not answer in time."""
        self.has_time = threading.Event()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        route = path.partition("?")[0]
        self.calls.append(path)
        self.bodies[route] = body
        self.was_paused_at[route] = self.is_paused
        if route == self.fails_at:
            return 500, {"error": "told to fail"}
        if route == "/weight_info" and self.slow_answers:
            self.slow_answers -= 1
            self.has_time.wait(10)
        if route == "/weight_checker":
            return 404, {"detail": "Not Found"}
        if route in ("/pause", "/resume"):
            self.is_paused = route == "/pause"
        if route == "/update_weight_version" and not self.keeps_version:
            self.weight_version = body["new_version"]
        if route == "/collective_rpc":
            self.may_answer.wait(10)
        answers: dict[str, Any] = {
            "/weight_info": {"weight_version": self.weight_version},
            "/is_paused": {"is_paused": self.is_paused},
            "/reset_prefix_cache": {"success": self.empties_cache},
        }
        if route == "/v1/completions":
            told = zip(body["prompt"][1:], self.logprobs, strict=True)
            found = [None, *({str(token): {"logprob": logprob}} for token, logprob in told)]
            return 200, {"choices": [{"prompt_logprobs": found}]}
        return 200, answers.get(route, {})


@contextmanager
def serve(engine: E) -> Iterator[E]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            engine.keys.add(self.headers.get("Authorization"))
            status, answer = engine.answer(self.path, json.loads(raw or b"null"))
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        engine.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield engine
        finally:
            server.shutdown()
            thread.join()
