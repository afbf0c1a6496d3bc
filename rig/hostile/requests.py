"""Hostile requests as bytes: right ones, bodies that are wrong in one place, bodies of any bytes, and broken HTTP."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from rig.hostile.json_values import Json, JsonMaker
from rig.hostile.operations import Operation

ARROW = "application/vnd.apache.arrow.stream"
SEGMENTS = (
    *("..", ".", "%2e%2e", "%00", "%ff", "%2F", "%20", "%zz", "%", "a" * 3_000, "v1", "{x}", "~", ";a=b", "*", "-"),
    *("channel", "static", "%C3%28", "%F0%9F%92%A9", "0", "init_trajectory", "atropos", "'", "%0d%0aX:%20y", "text"),
)
BODIES = (
    *(b"", b"null", b"[]", b'"text"', b"0", b"{", b"{}x", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"\x00" * 100, b"NaN"),
    *(b"[" * 5_000, b"[" * 100_000, b'{"a":' * 2_000, b'{"model":"tiny","model":"tiny"}', b"9" * 10_000),
    *(b'{"a":"\xc3("}', b'{"a":"\\ud800"}', b"a=b&c=d", b"<xml/>", '{"é":1}'.encode("utf-16"), b" " * 100_000),
    b"\x1f\x8b\x08",
)
TYPES = (
    *("application/json; charset=utf-16", "text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"),
    *("application/json/json", "*/*", ARROW, "application/octet-stream", "\xff"),
)
HEADERS = (
    *("Content-Encoding: gzip", "Content-Encoding: zstd", "Content-Encoding: br", f"Accept: {ARROW}"),
    *("Accept-Encoding: zstd", "Idempotency-Key: k", f"Idempotency-Key: {'k' * 9_000}", "x-stepwell-call: side"),
    *("x-stepwell-call: \xff", "Expect: 100-continue", "Upgrade: h2c", "Range: bytes=0-1", "Origin: null"),
    *("Host: evil.example", "X-Forwarded-For: 1.2.3.4", "traceparent: 00-zz", "Authorization: Bearer", "TE: trailers"),
    *("Authorization: Basic Og==", "Authorization: Bearer \xff\xfe", f"X-Large: {'x' * 70_000}", "Connection: close"),
    *("Forwarded: for=_x", "If-None-Match: *", "Authorization: \t", "Cookie: a=b"),
)
BROKEN = (
    *(b"GET / HTTP/9.9\r\n\r\n", b"GET\r\n\r\n", b"get / http/1.1\r\n\r\n", b"FOO / HTTP/1.1\r\nHost: x\r\n\r\n"),
    *(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\r\n\r\n\r\n", b"\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    *(b"POST /register HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: abc\r\n\r\n"),
    *(b"POST / HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"),
    *(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"GET / HTTP/1.1\r\nA: \x00\r\n\r\n"),
    *(b"POST /init_trajectory HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc", b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n"),
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    *(b"GET /%c3%a9/\xff HTTP/1.1\r\n\r\n", b"GET http://[::1 HTTP/1.1\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n"),
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"GET /ready HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
)
"""Not HTTP, or not what these servers speak. A server may end the connection, and must not wait or fail."""
OTHER_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "PROPFIND")
VALID, MUTATED, RAW_BODY, ODD = 0.45, 0.8, 0.88, 0.97
"""Up to here the share of right requests, of changed bodies, of raw bodies, of odd paths and headers."""


@dataclass(frozen=True, slots=True)
class HostileRequest:
    what: str
    """Method and path of the operation."""
    raw: bytes
    is_head: bool = False
    is_broken: bool = False
    """Not HTTP."""


class RequestMaker:
    """Makes up requests from a seed."""

    def __init__(self, operations: Sequence[Operation], keys: Sequence[str], chance: random.Random) -> None:
        """The first key is a control key."""
        self._operations = operations
        self._weights = [operation.weight for operation in operations]
        self._keys = keys
        self._chance = chance
        self._maker = JsonMaker(chance, {}, {})

    def choose(self) -> Operation:
        return self._chance.choices(self._operations, self._weights)[0]

    def make(self, operation: Operation, names: dict[str, str]) -> HostileRequest:
        """`names` fill the path."""
        chance, what = self._chance, f"{operation.method} {operation.path}"
        way = chance.random()
        if way > ODD:
            return HostileRequest(what, chance.choice(BROKEN), is_broken=True)
        method, path = operation.method, operation.path.format(**names)
        query = {name: self._maker.sample(schema) for name, schema in operation.query.items() if chance.random() < 0.5}
        value = None if operation.body is None else operation.body(chance)
        body = b"" if operation.body is None else self._json(value)
        key = self._keys[0] if way < VALID or chance.random() < 0.7 else chance.choice(self._keys)
        headers = [f"Authorization: Bearer {key}", "Content-Type: application/json"]
        if VALID <= way < MUTATED:
            if operation.body is not None:
                body = self._json(self._mutated(value))
            else:
                query |= {chance.choice(("fresh", "seconds", "limit", "address", "x")): self._maker.hostile()}
        elif MUTATED <= way < RAW_BODY:
            body = chance.choice((chance.choice(BODIES), body[: len(body) // 2], chance.randbytes(200)))
            if chance.random() < 0.4:
                headers[1] = f"Content-Type: {chance.choice(TYPES)}"
        elif way >= RAW_BODY:
            method, path, headers = self._odd(method, path, headers)
        request = self._written(method, path + _query(query), headers, body)
        return HostileRequest(what, request, is_head=method == "HEAD")

    def _mutated(self, value: Json) -> Json:
        for _ in range(self._chance.randint(1, 3)):
            value = self._maker.mutated(value)
        return value

    def _odd(self, method: str, path: str, headers: list[str]) -> tuple[str, str, list[str]]:
        chance = self._chance
        ways: list[Callable[[], tuple[str, str, list[str]]]] = [
            lambda: (chance.choice(OTHER_METHODS), path, headers),
            lambda: (method, "/" + "/".join(chance.choices(SEGMENTS, k=chance.randint(1, 5))), headers),
            lambda: (method, f"{path}/{chance.choice(SEGMENTS)}", headers),
            lambda: (method, f"/{path}", headers),
            lambda: (method, f"{path}?{'a=b&' * 2_000}", headers),
            lambda: (method, path, [*headers, *chance.choices(HEADERS, k=chance.randint(1, 3))]),
            lambda: (method, path, [*headers, *(f"X-{n}: y" for n in range(200))]),
        ]
        return chance.choice(ways)()

    def _json(self, value: object) -> bytes:
        text = json.dumps(value, ensure_ascii=self._chance.random() < 0.5)
        return text.encode(errors="replace")

    def _written(self, method: str, target: str, headers: list[str], body: bytes) -> bytes:
        lines = [f"{method} {target} HTTP/1.1", "Host: 127.0.0.1", *headers]
        if self._chance.random() < 0.05:
            lines.append("Transfer-Encoding: chunked")
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        else:
            lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def _query(values: Mapping[str, object]) -> str:
    written = (f"{quote(name)}={quote(str(value)[:2000].encode(errors='replace'))}" for name, value in values.items())
    return f"?{'&'.join(written)}" if values else ""
