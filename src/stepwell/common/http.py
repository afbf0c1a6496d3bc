"""Blocking HTTP calls, and URLs as they may be shown. Only the standard library: the agents' client has nothing else.

- The environment's proxy is not asked, unless the caller wants it: engines, gateways and dashboards are on this machine
  or near it, and their keys are for nobody else.
- An answer of any status is an Answer. Without one, OSError says why.
"""

import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException

PROBE_TIMEOUT = 5.0
"""Seconds that a server may take to answer a question of a command."""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    status: int
    """0 if there was no answer."""
    body: object
    """The parsed answer; without an answer, or if it is not JSON, a text that says so."""

    @property
    def message(self) -> str:
        """The error text of a refusal, in any of the usual formats."""
        match self.body:
            case (
                {"error": {"message": str(text)}}
                | {"message": str(text)}
                | {"detail": str(text)}
                | {"error": str(text)}
            ):
                return text
        return f"it answers {self.status}" if self.status else str(self.body)


def request(
    method: str,
    url: str,
    body: bytes | None = None,
    *,
    key: str | None = None,
    timeout: float,
    by_proxy: bool = False,
    most: int | None = None,
) -> Answer:
    """`body` is JSON; `key` goes into the header Authorization. `by_proxy`: the environment's proxy is asked, if it
    names one. With `most`, no more bytes of the answer are read."""
    headers = {} if method == "GET" else {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    asked = urllib.request.Request(url, body, headers, method=method)
    send = urllib.request.urlopen if by_proxy else DIRECT.open
    try:
        with send(asked, timeout=timeout) as answer:
            return Answer(answer.status, answer.read() if most is None else answer.read(most))
    except urllib.error.HTTPError as refusal:
        with refusal:
            return Answer(refusal.code, refusal.read() if most is None else refusal.read(most))
    except HTTPException as failure:
        raise ConnectionError(f"{type(failure).__name__}: {failure}") from None


def get_json(url: str, key: str | None = None, timeout: float = PROBE_TIMEOUT) -> JsonAnswer:
    """A question to a server that may be away."""
    try:
        answer = request("GET", url, key=key, timeout=timeout)
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "reason", failure)
        return JsonAnswer(0, getattr(reason, "strerror", None) or str(reason))
    try:
        return JsonAnswer(answer.status, json.loads(answer.body))
    except ValueError:
        return JsonAnswer(answer.status, answer.body[:200].decode(errors="replace"))


def hide_password(url: str) -> str:
    """The URL without the password, which it can have before its host and in its query."""
    before_host = re.sub(r"(://[^:/?@]*):[^/?]*@", r"\1@", url)
    return re.sub(r"([?&]password=)[^&]*", r"\1...", before_host)
