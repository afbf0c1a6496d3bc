"""One question over HTTP, to something on this machine or near it. No proxy stands between."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass

from stepwell.steps.step import Json

TIMEOUT = 5.0
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    """0 if nobody answered."""
    body: Json
    """What was answered, parsed; where nobody did, or that was no JSON, the reason in words."""


def get(url: str, key: str | None = None, timeout: float = TIMEOUT) -> Answer:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with OPENER.open(urllib.request.Request(url, headers=headers), timeout=timeout) as answer:
            return Answer(answer.status, _parsed(answer.read()))
    except urllib.error.HTTPError as refusal:
        with refusal:
            return Answer(refusal.code, _parsed(refusal.read()))
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "reason", failure)
        return Answer(0, getattr(reason, "strerror", None) or str(reason))


def message(answer: Answer) -> str:
    """What a refusal says, in any of the ways of saying it."""
    match answer.body:
        case {"error": {"message": str(text)}} | {"message": str(text)} | {"detail": str(text)} | {"error": str(text)}:
            return text
    return f"it answers {answer.status}" if answer.status else str(answer.body)


def _parsed(raw: bytes) -> Json:
    try:
        parsed: Json = json.loads(raw)
    except ValueError:
        return raw[:200].decode(errors="replace")
    return parsed
