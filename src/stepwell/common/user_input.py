"""Input of users and clients: lengths of time, settings and JSON bodies, and sentences for what is wrong in it.

- pydantic's own texts are for programmers. Values are not repeated: they may be keys.
- The objects and lists of a JSON text are bounded before it is parsed: each takes twenty times as much memory as its
  two brackets.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stepwell.errors import TooLarge

SHOULD = re.compile(r"^[A-Z][a-z]+ should ")
WORDS = (
    (re.compile(r", unable to parse .*$"), ""),
    (re.compile(r"\ba valid dictionary( or object to extract fields from)?|\ban object\b"), "a JSON object"),
    (re.compile(r"\ba valid (list|tuple|array|set)\b"), "a list"),
    (re.compile(r"\ba valid (string|boolean|number)\b"), r"a \1"),
    (re.compile(r"\ba valid integer\b"), "a whole number"),
    (re.compile(r"\bgreater than or equal to\b"), "at least"),
    (re.compile(r"\bless than or equal to\b"), "at most"),
)

DURATION = re.compile(r"(?P<count>\d{1,9}(\.\d{1,9})?)(?P<unit>[smhdw])")
SECONDS: Mapping[str, float] = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}

MOST_CONTAINERS = 250_000
LARGEST_READ = 8 * 1024 * 1024
"""Bytes in which brackets are told apart from those in strings."""
STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def dotted(place: tuple[int | str, ...]) -> str:
    return ".".join(map(str, place))


def explain_all(
    errors: Iterable[Mapping[str, Any]], name: Callable[[tuple[int | str, ...]], str] = dotted, separator: str = "; "
) -> str:
    """All that `ValidationError.errors()` has. `name` tells how the reader calls a place."""
    return separator.join(explain(error, name(error["loc"])) for error in errors)


def explain(error: Mapping[str, Any], name: str) -> str:
    """One mistake; the whole input is wrong if `name` is empty."""
    kind, text = error["type"], str(error["msg"])
    if kind == "missing":
        return f"{name} is missing"
    if kind == "extra_forbidden":
        return f"{name}: there is no such field"
    if kind == "json_invalid":
        return f"it is not JSON: {error.get('ctx', {}).get('error', text)}"
    if SHOULD.match(text):
        text = SHOULD.sub("", text)
        for words, replacement in WORDS:
            text = words.sub(replacement, text)
        return f"{name or 'it'} must {text}"
    return f"{name}: {text.removeprefix('Value error, ')}".removeprefix(": ")


def read_duration(text: str) -> float | None:
    """Reads a duration in seconds; None if the text is not a number with s, m, h, d or w behind it."""
    found = DURATION.fullmatch(text.strip())
    return None if found is None else float(found["count"]) * SECONDS[found["unit"]]


def check_containers(body: bytes, most: int = MOST_CONTAINERS) -> None:
    """TooLarge if the JSON text has too many objects and lists. Brackets within strings do not count, unless the body
    is so large that to tell them apart would take long."""
    if len(body) < 2 * most or brackets(body) <= most:
        return
    if brackets(STRINGS.sub(b"", body) if len(body) <= LARGEST_READ else body) > most:
        raise TooLarge(too_many_text(most))


def brackets(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")


def too_many_text(most: int) -> str:
    return f"the request body has more than {most} objects and lists"
