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
from collections.abc import Iterator
from functools import partial
from symtable import SymbolTable, symtable
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType
from typing import Any

from stepwell.rewards.harness.limits import failure_text, prepare, read_job
from stepwell.rewards.harness.operations import OPERATIONS
from stepwell.rewards.harness.peer import Peer
from stepwell.rewards.harness.remote import TEST
from stepwell.rewards.harness.wire import ProtocolError

CALLABLE = (FunctionType, BuiltinFunctionType, MethodType, partial)
PRIVILEGED_MODULES = ("builtins", "_io", "io", "posix")
"""Built-in functions of these that wire.KNOWN does not have (`getattr`, `exec`, `open`) lead to the whole process."""
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

    def __init__(self) -> None:
        self._exported: set[int] = set()
        self.is_influenced = True
        """The code has given the test a value, so it can be the reason for whatever the test does next."""

    def describe(self, value: Any) -> dict[str, Any]:
        kind = type(value)
        is_passive = isinstance(value, GeneratorType) or (
            kind.__module__ in PASSIVE_MODULES and hasattr(kind, "__iter__")
        )
        is_privileged = kind is BuiltinFunctionType and value.__module__ in PRIVILEGED_MODULES
        is_callable = isinstance(value, CALLABLE) and not is_privileged
        if not (is_passive or is_callable or _is_of_test(kind) or _is_of_test(value)):
            raise TypeError(f"an object of type {kind.__name__} cannot be given to the code")
        self._exported.add(id(value))
        return {"callable": callable(value)}

    def cannot_send(self, why: Exception) -> BaseException:
        """A size or a depth is always the code's doing."""
        if isinstance(why, TypeError) and not self.is_influenced:
            return BrokenTest(str(why))
        return ProtocolError(f"the test cannot give this to the code: {why}")

    def perform(self, operation: str, arguments: Any) -> Any:
        if type(arguments) is not tuple or not arguments:
            raise TypeError("the arguments could change after they are checked")
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
        self.is_influenced = True
        if type(news) is not str:
            raise ProtocolError("what was printed is no text")
        sys.stdout.write(news)


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


def names_of_code(test: str, tree: ast.Module) -> set[str]:
    """The names that a test uses and does not bind itself: only these can be the code's."""
    module, *inner = _tables(symtable(test, TEST, "exec"))
    bound = {name.get_name() for name in module.get_symbols() if name.is_assigned() or name.is_imported()}
    for table in inner:
        bound |= {name.get_name() for name in table.get_symbols() if name.is_declared_global() and name.is_assigned()}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return {name for name in used - bound if not name.startswith("__")}


def _tables(table: SymbolTable) -> Iterator[SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def run_test(peer: Peer, owner: JudgeObjects, code: str, test: str, namespace: dict[str, Any]) -> None:
    try:
        tree = ast.parse(test, TEST)
        program = compile(tree, TEST, "exec")
        used = names_of_code(test, tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as failure:
        raise BrokenTest(failure_text(failure)) from None
    peer.request("start", code)
    owner.is_influenced, given = False, {}
    for name, value in peer.request("names", *sorted(used)):
        if type(name) is not str or name not in used:
            raise AssertionError("the code gives a name that the test did not ask for")
        if name in vars(builtins) and value is not getattr(builtins, name):
            raise AssertionError(f"the code redefines {name}, which the test uses; a test calls it candidate.{name}")
        given[name] = value
    owner.is_influenced = not all(map(callable, given.values()))
    namespace |= given
    exec(program, namespace)


def judge(peer: Peer, owner: JudgeObjects, job: dict[str, str], namespace: dict[str, Any]) -> dict[str, Any]:
    try:
        run_test(peer, owner, job["code"], job["test"], namespace)
    except BrokenTest as failure:
        return {"broken": str(failure)}
    except BaseException as failure:  # noqa: BLE001 - any exception is a failure
        return {"failed": peer.failure or failure_text(failure)}
    return {"failed": peer.failure} if peer.failure else {"passed": True}


def main() -> None:
    descriptor, answers = prepare()
    job = read_job()
    namespace: dict[str, Any] = {"__name__": TEST, "__builtins__": builtins}
    owner = JudgeObjects()
    peer = Peer(socket.socket(fileno=descriptor), owner, is_test=True)
    namespace["candidate"] = Candidate(peer)
    verdict = judge(peer, owner, job, namespace)
    os.write(answers, json.dumps(verdict).encode())
    os._exit(0)
