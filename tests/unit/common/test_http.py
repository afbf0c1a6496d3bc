from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from stepwell.common.http import Answer, get_json, hide_password, request


class Echo(BaseHTTPRequestHandler):
    """Answers with what it was asked; /refused with 409."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(409 if self.path == "/refused" else 200)
        self.end_headers()
        self.wfile.write(b"%s %s" % ((self.headers.get("Authorization") or "no key").encode(), body))

    do_GET = do_POST

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Echo) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def test_an_answer_of_any_status_is_an_answer(server: str) -> None:
    assert request("POST", f"{server}/x", b"{}", key="k", timeout=5) == Answer(200, b"Bearer k {}")
    assert request("POST", f"{server}/refused", b"[]", timeout=5) == Answer(409, b"no key []")
    assert request("GET", f"{server}/x", timeout=5, most=2) == Answer(200, b"no")


def test_the_proxy_of_the_environment_is_not_asked(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr("urllib.request._opener", None)  # it keeps the environment of its first call
    assert request("GET", f"{server}/x", timeout=5).status == 200
    with pytest.raises(OSError, match="refused"):
        request("GET", f"{server}/x", timeout=5, by_proxy=True)


def test_a_question_to_a_server_that_is_away_has_status_0() -> None:
    answer = get_json("http://127.0.0.1:9/ready")
    assert (answer.status, answer.message) == (0, "Connection refused")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ana:se:cr@t@db:5432,other/pool", "postgresql://ana@db:5432,other/pool"),
        ("postgresql://db/pool?password=secret&sslmode=require", "postgresql://db/pool?password=...&sslmode=require"),
        ("postgresql://ana@db:5432/pool", "postgresql://ana@db:5432/pool"),
        ("/var/lib/stepwell", "/var/lib/stepwell"),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert hide_password(url) == shown
