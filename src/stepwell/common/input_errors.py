"""Sentences for what pydantic finds wrong with settings and bodies: its own texts are for programmers.

Values are not repeated: they may be keys.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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
