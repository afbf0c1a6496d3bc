"""The program that runs a candidate's code, and answers the questions of the test's process.

It knows neither the tests nor what they expect. It belongs to the candidate as soon as the candidate's code runs:
nothing that it says is trusted.
"""

import builtins
import io
import os
import sys
from typing import Any

from stepwell.rewards.candidate.start import prepare
from stepwell.rewards.candidate.values import Ended, LineChannel, Unsayable, from_json, to_json

MOST_PRINTED = 100_000
"""Characters that one reply may say were printed; the rest is dropped."""
LONGEST_TEXT = 300


class Candidate:
    """The code's namespace, and what can be asked of it. A reply is as channel.py says."""

    def __init__(self) -> None:
        self._namespace: dict[str, Any] = {"__name__": "candidate"}

    def reply(self, operation: str, arguments: list[Any]) -> list[Any]:
        inputs = from_json(arguments)
        try:
            outcome, content = "value", to_json(getattr(self, f"_{operation}")(*inputs))
        except Unsayable as why:
            outcome, content = "object", str(why)
        except BaseException as failure:  # noqa: BLE001 - the code may raise anything
            outcome, content = "raise", described(failure)
        try:
            now = to_json(inputs)
        except Unsayable as why:
            outcome, content, now = "object", f"an argument that now holds {why}", arguments
        return [outcome, content, None if now == arguments else now, self._printed()]

    def _start(self, code: str) -> None:
        exec(compile(code, "candidate", "exec"), self._namespace)

    def _names(self, *names: str) -> dict[str, list[Any]]:
        """The functions and values among these names that the code defines: [True], and [False, the value]."""
        found: dict[str, list[Any]] = {}
        for name in self._namespace.keys() & names:
            value = self._namespace[name]
            if value is getattr(builtins, name, self):
                continue
            if callable(value):
                found[name] = [True]
            elif is_sayable(value):
                found[name] = [False, value]
        return found

    def _call(self, name: str, args: list[Any], keywords: dict[str, Any]) -> Any:
        return self._namespace[name](*args, **keywords)

    def _run(self, source: str) -> Any:
        """Statements; gives the value of the last one if that is an expression."""
        import ast  # seldom needed

        body = ast.parse(source, "in_candidate").body
        last = body[-1] if body else None
        if not isinstance(last, ast.Expr):
            return exec(compile(source, "in_candidate", "exec"), self._namespace)
        exec(compile(ast.Module(body[:-1], []), "in_candidate", "exec"), self._namespace)
        return eval(compile(ast.Expression(last.value), "in_candidate", "eval"), self._namespace)

    def _printed(self) -> str:
        out: Any = sys.stdout
        printed = out.getvalue()[:MOST_PRINTED] if isinstance(out, io.StringIO) else ""
        if printed:
            out.seek(0)
            out.truncate()
        return printed


def is_sayable(value: Any) -> bool:
    try:
        to_json(value)
    except Unsayable:
        return False
    return True


def described(failure: BaseException) -> list[Any]:
    """The exception as JSON: the name of its built-in base class, and its arguments; those that are no values are
    texts."""
    name = next(base.__name__ for base in type(failure).__mro__ if base.__module__ == "builtins")
    return [name, to_json([arg if is_sayable(arg) else text_of(arg) for arg in failure.args[:10]])]


def text_of(value: Any) -> str:
    try:
        return str(value)[:LONGEST_TEXT]
    except BaseException:  # noqa: BLE001 - its class may be the candidate's
        return "(its text cannot be shown)"


def main() -> None:
    descriptor, answers = prepare()
    os.close(answers)
    sys.stdout = io.StringIO()
    sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    channel, candidate = LineChannel(descriptor), Candidate()
    try:
        while True:
            operation, arguments = channel.receive()
            reply = candidate.reply(operation, arguments)
            try:
                channel.send(reply)
            except (ValueError, MemoryError):
                channel.send(["object", "a value that is too large", None, ""])
    except Ended:
        os._exit(0)
