"""The program that runs a candidate's code, and does with its objects what the test's process asks for.

It knows neither the tests nor what they expect. It belongs to the candidate as soon as the candidate's code runs:
nothing that it says is trusted.
"""

import io
import os
import socket
import sys
from collections import deque
from collections.abc import Callable
from inspect import iscoroutine
from typing import Any

from stepwell.rewards.harness.limits import prepare
from stepwell.rewards.harness.operations import OPERATIONS
from stepwell.rewards.harness.peer import Peer, PeerEnded

ATOMS: dict[type, Callable[[Any], object]] = {
    int: int.__pos__,
    float: float.__pos__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: bytes.__bytes__,
}
"""Types without parts, and how a value of a derived class becomes one of theirs."""
CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
VIEWS: Any = (type({}.keys()), type({}.items()))
BASES = ("int", "float", "complex", "str", "bytes", "list", "tuple", "dict", "set", "frozenset")
MOST_PRINTED = 100_000
"""Characters that one request may print; the rest is dropped."""


class CandidateObjects:
    """The owner of the candidate's objects."""

    def __init__(self) -> None:
        self._namespace: dict[str, Any] = {"__name__": "candidate"}

    def describe(self, value: Any) -> dict[str, Any]:
        base = next((kind.__name__ for kind in type(value).__mro__ if kind.__name__ in BASES), "")
        return {"callable": callable(value), "base": base, "coroutine": iscoroutine(value)}

    def cannot_send(self, why: Exception) -> BaseException:
        return why

    def perform(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        if operation == "start":
            return exec(compile(arguments[0], "candidate", "exec"), self._namespace)
        if operation == "names":
            return tuple((name, self._namespace[name]) for name in arguments if name in self._namespace)
        return plain_or_none(*arguments) if operation == "plain" else OPERATIONS[operation](*arguments)

    def news(self) -> str:
        """What was printed."""
        out: Any = sys.stdout
        printed = out.getvalue()[:MOST_PRINTED] if isinstance(out, io.StringIO) else ""
        if printed:
            out.seek(0)
            out.truncate()
        return printed

    def take_news(self, news: Any) -> None:
        """There is none."""


def plain_or_none(value: Any) -> tuple[Any] | None:
    """In a tuple, the value of a built-in type that an object of a derived class stands for."""
    if isinstance(value, dict):
        return (dict(dict.items(value)),)
    if isinstance(value, VIEWS):
        return (set(value),)
    for base in CONTAINERS:
        if isinstance(value, base):
            return (base(base.__iter__(value)),)
    return next(((copy(value),) for base, copy in ATOMS.items() if isinstance(value, base)), None)


def main() -> None:
    descriptor, answers = prepare()
    os.close(answers)
    sys.stdout = io.StringIO()
    sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    try:
        Peer(socket.socket(fileno=descriptor), CandidateObjects(), is_test=False).serve()
    except PeerEnded:
        os._exit(0)
