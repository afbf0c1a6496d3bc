"""The program that runs a candidate's code with one test: a job as JSON on stdin, the verdict on stdout.

It is started as a file in isolated mode, so it imports nothing of Stepwell. It writes READY after its limits are set
and before any code of the candidate runs; without READY, the failure is not the candidate's. What the candidate prints
is discarded.

The test decides, not the candidate: a comparison that is written in the test uses `__eq__`, `__lt__` and so on of the
candidate's classes only between two objects of such classes, and the test has the built-in functions of Python.
"""

import ast
import builtins
import json
import operator
import os
import resource
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

READY = b"ready\n"
FAILED = b"failed: "
LONGEST_TEXT = 300
PLAIN = "__stepwell_plain__"
"""The name under which the test finds `plain`."""
HEAP_TYPE = 1 << 9
"""The flag of a class that was made at run time (Py_TPFLAGS_HEAPTYPE)."""
ATOMS: dict[type, Callable[[Any], object]] = {
    int: int.__pos__,
    float: float.__pos__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: bytes.__bytes__,
    bool: bool,
    type(None): lambda nothing: nothing,
}
"""Types without parts, and how a value of a derived class becomes one of theirs."""
CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)


def main() -> None:
    job = json.load(sys.stdin)
    verdict = _discard_output()
    for name, limit in job["limits"].items():
        _limit(getattr(resource, name), limit)
    os.write(verdict, READY)
    try:
        _run(job["code"], job["test"])
    except BaseException as failure:  # noqa: BLE001 - any exception is a failure
        os.write(verdict, FAILED + _failure_text(failure))
        os._exit(1)
    os.write(verdict, job["passed"].encode())
    os._exit(0)


def _run(code: str, test: str) -> None:
    functions = dict(vars(builtins))
    namespace: dict[str, object] = {"__name__": "candidate"}
    exec(compile(code, "candidate", "exec"), namespace)
    vars(builtins).update(functions)
    namespace |= {"__builtins__": builtins, PLAIN: plain}
    tree = ComparedOperands().visit(ast.parse(test, "test"))
    exec(compile(ast.fix_missing_locations(tree), "test", "exec"), namespace)


class ComparedOperands(ast.NodeTransformer):
    """Passes every operand of a comparison through `plain`. Identity needs no protection, and would be lost."""

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        self.generic_visit(node)
        if not any(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops):
            node.left, *node.comparators = map(_call_plain, (node.left, *node.comparators))
        return node


def _call_plain(operand: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(PLAIN, ast.Load()), [operand], [])


def plain(value: object) -> object:
    """The value as a test compares it: one of Python's own types as it is, any other without its own operators.

    An object of a class derived from a built-in type becomes a value of that type.
    """
    kind = type(value)
    if kind in ATOMS:
        return value
    if isinstance(value, dict) and (kind is dict or not _is_known(kind)):
        return {plain(key): plain(element) for key, element in dict.items(value)}
    for base in CONTAINERS:
        if isinstance(value, base) and (kind is base or not _is_known(kind)):
            return base(map(plain, base.__iter__(value)))
    if _is_known(kind):
        return value
    return next((copy(value) for base, copy in ATOMS.items() if isinstance(value, base)), CandidateObject(value))


def _is_known(kind: type) -> bool:
    """Whether a class is Python's or a package's: built in, or found in its module."""
    module = sys.modules.get(kind.__module__)
    return not kind.__flags__ & HEAP_TYPE or (module is not None and vars(module).get(kind.__qualname__) is kind)


def _between_candidates(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def method(self: Any, other: Any) -> bool:
        return compare(self.value, other.value) if isinstance(other, CandidateObject) else NotImplemented

    return method


class CandidateObject:
    """An object of a class of the candidate's in a comparison: its operators apply to other such objects only."""

    def __init__(self, value: Any) -> None:
        self.value = value

    __eq__ = _between_candidates(operator.eq)
    __lt__ = _between_candidates(operator.lt)
    __le__ = _between_candidates(operator.le)
    __gt__ = _between_candidates(operator.gt)
    __ge__ = _between_candidates(operator.ge)

    def __hash__(self) -> int:
        return hash(self.value)

    def __contains__(self, item: object) -> bool:
        if hasattr(type(self.value), "__contains__") and _holds_anything(self.value):
            raise AssertionError("the container claims to hold everything")
        return (item.value if isinstance(item, CandidateObject) else item) in self.value


def _holds_anything(container: Any) -> bool:
    try:
        return object() in container
    except Exception:  # noqa: BLE001 - an honest container may refuse to look for such an object
        return False


def _discard_output() -> int:
    """Redirects the three standard streams to /dev/null; returns the old stdout."""
    verdict, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    return verdict


def _limit(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    lower = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (lower, lower))


def _failure_text(failure: BaseException) -> bytes:
    return f"{type(failure).__name__}: {failure}".removesuffix(": ")[:LONGEST_TEXT].encode(errors="replace")


if __name__ == "__main__":
    main()
