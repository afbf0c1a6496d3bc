"""GET requests for JSON, to servers on this machine or near it, without a proxy."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass

from stepwell.steps.step import Json

TIMEOUT = 5.0
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    status: int
    """0 if there was no answer."""
    body: Json
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


def get_json(url: str, key: str | None = None, timeout: float = TIMEOUT) -> JsonAnswer:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with OPENER.open(urllib.request.Request(url, headers=headers), timeout=timeout) as answer:
            return JsonAnswer(answer.status, _parsed(answer.read()))
    except urllib.error.HTTPError as refusal:
        with refusal:
            return JsonAnswer(refusal.code, _parsed(refusal.read()))
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "reason", failure)
        return JsonAnswer(0, getattr(reason, "strerror", None) or str(reason))


def _parsed(raw: bytes) -> Json:
    try:
        parsed: Json = json.loads(raw)
    except ValueError:
        return raw[:200].decode(errors="replace")
    return parsed
