"""A bound on the objects and lists of a JSON text, before it is parsed: each takes twenty times as much memory as its
two brackets."""

import re

from stepwell.errors import TooLarge

MOST_CONTAINERS = 250_000
LARGEST_READ = 8 * 1024 * 1024
"""Bytes in which brackets are told apart from those in strings."""
STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


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
