"""The program that runs one test of a candidate's code: the job as JSON on stdin, the verdict as JSON on stdout.

The code runs in another process; this one has only RemoteObjects and plain data of it. The names that the test uses
and the code defines are there under the same names, and as attributes of `candidate`.
"""

import ast
import builtins
import json
import os
import socket
import sys
from functools import partial
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType
from typing import Any, NoReturn

from stepwell.rewards.harness.limits import failure_text, prepare, read_job
from stepwell.rewards.harness.operations import OPERATIONS
from stepwell.rewards.harness.peer import Peer, PeerEnded
from stepwell.rewards.harness.wire import ProtocolError

TEST = "test"
"""The module of the test's classes."""
CALLABLE = (FunctionType, BuiltinFunctionType, MethodType, partial)
PASSIVE_MODULES = ("builtins", "itertools", "collections")
"""Objects of their classes can be iterated over, and no attribute of them is given away."""
ALLOWED = frozenset(
    [
        "plain",
        "getattr",
        "setattr",
        "call",
        "iter",
        "next",
        "len",
        "getitem",
        "setitem",
        "contains",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "hash",
        "str",
        "repr",
        "bool",
    ]
)


class BrokenTest(BaseException):
    """The fault is the test's, not the code's."""


class JudgeObjects:
    """The owner of the test's objects. The code gets functions, which it may call; iterators; and objects of the test's
    own classes, whose public attributes it may use. Nothing leads from these to the rest of this process."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._exported: set[int] = set()
        self.given: dict[str, Any] = {}
        """Names of the code, and their values when the code last told them."""

    def describe(self, value: Any) -> dict[str, Any]:
        kind = type(value)
        is_passive = isinstance(value, GeneratorType) or (
            kind.__module__ in PASSIVE_MODULES and hasattr(kind, "__iter__")
        )
        if not (is_passive or isinstance(value, CALLABLE) or _is_of_test(kind) or _is_of_test(value)):
            raise TypeError(f"an object of type {kind.__name__} cannot be given to the code")
        self._exported.add(id(value))
        return {"callable": callable(value)}

    def cannot_send(self, why: Exception) -> NoReturn:
        raise BrokenTest(str(why))

    def perform(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        target = arguments[0]
        if id(target) not in self._exported or operation not in ALLOWED:
            raise TypeError(f"{operation} is not allowed with this object")
        if operation == "plain":
            return None
        if operation in ("getattr", "setattr"):
            _check_attribute(operation, target, arguments[1])
        return OPERATIONS[operation](*arguments)

    def news(self) -> Any:
        return None

    def take_news(self, news: Any) -> None:
        printed, changed = news
        if type(printed) is not str:
            raise ProtocolError("what was printed is no text")
        sys.stdout.write(printed)
        for name, value in changed:
            if name in self.given and self._namespace.get(name) is self.given[name]:
                self.given[name] = self._namespace[name] = value


class Candidate:
    """`candidate.pow` is the code's own function, also if Python has one of that name."""

    def __init__(self, peer: Peer) -> None:
        self.__peer = peer

    def __getattr__(self, name: str) -> Any:
        for _, value in self.__peer.request("names", name):
            return value
        raise AttributeError(f"the code does not define {name!r}")


def _is_of_test(kind: Any) -> bool:
    return isinstance(kind, type) and kind.__module__ == TEST


def _check_attribute(operation: str, target: Any, name: Any) -> None:
    if type(name) is not str or name.startswith("_") or not _is_of_test(type(target)):
        raise AttributeError(f"{name!r} of an object of the test cannot be used")
    if operation == "setattr" and callable(getattr(type(target), name, None)):
        raise AttributeError(f"{name!r} is a method of the test's class")


def run_test(peer: Peer, owner: JudgeObjects, code: str, test: str, namespace: dict[str, Any]) -> None:
    try:
        tree = ast.parse(test, TEST)
        program = compile(tree, TEST, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as failure:
        raise BrokenTest(failure_text(failure)) from None
    peer.request("start", code)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for name, value in peer.request("names", *sorted(used)):
        if name in vars(builtins) and value is not getattr(builtins, name):
            raise AssertionError(f"the code redefines {name}, which the test uses; a test calls it candidate.{name}")
        if name in used:
            owner.given[name] = namespace[name] = value
    exec(program, namespace)


def judge(peer: Peer, owner: JudgeObjects, job: dict[str, str], namespace: dict[str, Any]) -> dict[str, Any]:
    try:
        run_test(peer, owner, job["code"], job["test"], namespace)
    except BrokenTest as failure:
        return {"broken": str(failure)}
    except (PeerEnded, ProtocolError):
        pass
    except BaseException as failure:  # noqa: BLE001 - any exception is a failure
        if not peer.failure:
            return {"failed": failure_text(failure)}
    return {"failed": peer.failure} if peer.failure else {"passed": True}


def main() -> None:
    descriptor, answers = prepare()
    job = read_job()
    namespace: dict[str, Any] = {"__name__": TEST, "__builtins__": builtins}
    owner = JudgeObjects(namespace)
    peer = Peer(socket.socket(fileno=descriptor), owner, first=0)
    namespace["candidate"] = Candidate(peer)
    verdict = judge(peer, owner, job, namespace)
    os.write(answers, json.dumps(verdict).encode())
    os._exit(0)
