"""ParsedTest: a test before it runs, with the names that are the code's.

A test exchanges only values (values.py) with the code. RefusedTest says why one surely wants more, and what to write
instead; this depends on nothing that the code is or does.
"""

import ast
import builtins
from collections.abc import Callable, Iterator
from importlib import import_module
from symtable import Symbol, SymbolTable, symtable
from types import CodeType
from typing import Any, NamedTuple

from stepwell.rewards.candidate.start import failure_text

TEST = "test"
"""The module of the test, and the file of its program."""
NAMES, EVALUATE = "candidate", "in_candidate"
"""The names that a test has besides Python's and the code's: `candidate.pow`, `in_candidate("Stack().pop()")`."""
HOW = f"write {EVALUATE}('…'), which runs Python beside the code and gives the value of the last line"
VALUES: tuple[type, ...] = (
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    list,
    tuple,
    dict,
    set,
    frozenset,
    range,
    type(iter([])),
)
MORE_VALUES = {
    "collections": ("Counter", "deque"),
    "datetime": ("date", "datetime", "time", "timedelta"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "numpy": ("ndarray", "generic"),
}
CLASS_ARGUMENT = {
    "isinstance": 1,
    "issubclass": 1,
    "raises": 0,
    "assertRaises": 0,
    "assertRaisesRegex": 0,
    "suppress": 0,
}
"""Functions, and which argument of theirs is a class."""


class RefusedTest(Exception):
    """The fault is the test's, not the code's."""


class ParsedTest(NamedTuple):
    program: CodeType
    names: tuple[str, ...]
    """The names that it uses and does not bind itself: only these can be the code's."""


def read_source(test: str) -> ParsedTest:
    """RefusedTest says what to write instead."""
    try:
        tree = ast.parse(test, TEST)
        program = compile(tree, TEST, "exec")
        module, *inner = _tables(symtable(test, TEST, "exec"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as failure:
        raise RefusedTest(failure_text(failure)) from None
    bound = _names(module, lambda name: name.is_assigned() or name.is_imported())
    used, local = _names(module, Symbol.is_referenced), set()
    for table in inner:
        bound |= _names(table, lambda name: name.is_declared_global() and name.is_assigned())
        used |= _names(table, lambda name: name.is_global() and name.is_referenced())
        local |= _names(table, lambda name: name.is_local() or name.is_parameter())
    used -= {*bound, NAMES, EVALUATE}
    names = {name for name in used if not name.startswith("__")}
    for objection in _Objections(tree, of_code=names - local - vars(builtins).keys(), bound=bound | local).sentences():
        raise RefusedTest(objection)
    return ParsedTest(program, tuple(sorted(names)))


def _tables(table: SymbolTable) -> Iterator[SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _names(table: SymbolTable, wanted: Callable[[Symbol], bool]) -> set[str]:
    return {name.get_name() for name in table.get_symbols() if wanted(name)}


class _Objections:
    """The parts of a test that surely want more than values."""

    def __init__(self, tree: ast.Module, *, of_code: set[str], bound: set[str]) -> None:
        self._tree = tree
        self._of_code = of_code
        self._bound = bound
        kinds: Any = (ast.FunctionDef, ast.AsyncFunctionDef)
        self._functions = {node.name for node in tree.body if isinstance(node, kinds)}
        self._classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        self._results = self._assigned_from(self._is_call_of_code)
        self._objects = self._assigned_from(self._is_call_of_class)

    def sentences(self) -> Iterator[str]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call):
                yield from self._of_call(node)
            elif isinstance(node, ast.Attribute) and not _has_a_value(node.attr):
                if self._is_of_code(node.value) or self._is_result(node.value):
                    yield (
                        f"{_text(node)}: no value has a {node.attr!r}, objects and modules of the code stay with it, "
                        f"and a test imports what it uses; {HOW}"
                    )
            elif isinstance(node, ast.ExceptHandler | ast.ClassDef):
                kinds: list[Any] = node.bases if isinstance(node, ast.ClassDef) else [node.type]
                for kind in kinds:
                    yield from self._of_class(kind)
            elif isinstance(node, ast.withitem) and self._is_result(node.context_expr):
                yield f"with {_text(node.context_expr)}: a value is no context manager; {HOW}"
            elif isinstance(node, ast.Await) and self._is_result(node.value):
                yield f"await {_text(node.value)}: a coroutine is no value; {HOW}"

    def _of_call(self, call: ast.Call) -> Iterator[str]:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if self._is_call_of_code(call):
            for given in _given([*call.args, *(keyword.value for keyword in call.keywords)]):
                if what := self._no_value(given):
                    yield f"{_text(call)}: {what} is no value, and only values can be given to the code; {HOW}"
        elif name == EVALUATE and len(call.args) == 1 and isinstance(call.args[0], ast.Constant):
            yield from _of_snippet(call.args[0].value)
        elif name in CLASS_ARGUMENT:
            for kind in call.args[CLASS_ARGUMENT[name] :][:1]:
                yield from self._of_class(kind)
        elif _text(call.func) == "asyncio.run" and call.args and self._is_result(call.args[0]):
            yield f"{_text(call)}: a coroutine is no value; {HOW}"

    def _of_class(self, kind: ast.expr | None) -> Iterator[str]:
        for each in kind.elts if isinstance(kind, ast.Tuple) else [kind]:
            if each is not None and self._is_of_code(each):
                yield (
                    f"{_text(each)}: a class of the code is not known to the test. Of an exception, write the class of "
                    f"Python's that it derives from; else {HOW}"
                )

    def _is_of_code(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Attribute):
            return isinstance(node.value, ast.Name) and node.value.id == NAMES and NAMES not in self._bound
        return isinstance(node, ast.Name) and node.id in self._of_code

    def _is_call_of_code(self, node: ast.expr | None) -> bool:
        return isinstance(node, ast.Call) and self._is_of_code(node.func)

    def _is_call_of_class(self, node: ast.expr | None) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self._classes

    def _is_result(self, node: ast.expr) -> bool:
        return self._is_call_of_code(node) or (isinstance(node, ast.Name) and node.id in self._results)

    def _no_value(self, node: ast.expr) -> str:
        """The argument, in words, if it is surely no value."""
        name = node.id if isinstance(node, ast.Name) else ""
        if isinstance(node, ast.Lambda) or name in self._functions:
            return "a function"
        if name in self._classes or (name not in self._bound and callable(vars(builtins).get(name))):
            return name
        return "an object of the test" if self._is_call_of_class(node) or name in self._objects else ""

    def _assigned_from(self, is_wanted: Callable[[ast.expr | None], bool]) -> set[str]:
        """The names that are bound by such assignments only."""
        wanted = [
            target
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Assign) and is_wanted(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        ]
        stored = (node for node in ast.walk(self._tree) if isinstance(node, ast.Name) and type(node.ctx) is ast.Store)
        return {target.id for target in wanted} - {node.id for node in stored if node not in wanted}


def _given(nodes: list[Any]) -> Iterator[Any]:
    """Expressions, and in the place of a list, tuple, set or dict its parts."""
    for node in nodes:
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            yield from _given(node.elts)
        elif isinstance(node, ast.Dict):
            yield from _given(node.values)
        elif isinstance(node, ast.Starred):
            yield from _given([node.value])
        else:
            yield node


def _of_snippet(source: object) -> Iterator[str]:
    try:
        tree = ast.parse(str(source))
    except (SyntaxError, ValueError) as failure:
        yield f"{EVALUATE}({source!r}): {failure_text(failure)}"
        return
    if any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        yield f"{EVALUATE}({source!r}): the code would decide this assert; compare the value in the test"


def _has_a_value(attribute: str) -> bool:
    if any(hasattr(kind, attribute) for kind in VALUES):
        return True
    for name, kinds in MORE_VALUES.items():
        try:
            module = import_module(name)
        except ImportError:
            continue
        if any(hasattr(getattr(module, kind), attribute) for kind in kinds):
            return True
    return False


def _text(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 80 else f"{text[:77]}…"
