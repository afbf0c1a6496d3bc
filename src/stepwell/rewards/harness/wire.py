"""Values as JSON, between two processes of which one runs hostile code.

- Reading executes nothing: a value is one of the types below, a container of them, or a reference to an object that
  stays in the other process.
- Lists, dicts and other mutable containers are shared: each message carries the contents of those that have changed, so
  both processes see what the other did to them.
- Every malformed message is a ProtocolError.
"""

import base64
import builtins
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from importlib import import_module
from operator import is_
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Protocol

LARGEST_NUMBER = 2**63
"""Larger integers are written in hexadecimal: Python reads only short decimal ones."""
ATOMS = (int, float, str, bool, type(None))
SHARED: dict[str, type] = {kind.__name__: kind for kind in (list, dict, set, bytearray, deque, Counter, OrderedDict)}
DATES: dict[str, Any] = {kind.__name__: kind for kind in (date, datetime, time)}
KNOWN_MODULES = frozenset(
    [
        "bisect",
        "cmath",
        "collections",
        "copy",
        "datetime",
        "decimal",
        "fractions",
        "functools",
        "heapq",
        "itertools",
        "json",
        "math",
        "numpy",
        "operator",
        "random",
        "re",
        "statistics",
        "string",
    ]
)
"""A module of these goes by name: each process has its own."""
KNOWN: dict[str, frozenset[str] | None] = {
    "builtins": frozenset(
        [
            "abs",
            "all",
            "any",
            "ascii",
            "bin",
            "bool",
            "bytearray",
            "bytes",
            "callable",
            "chr",
            "complex",
            "dict",
            "divmod",
            "enumerate",
            "filter",
            "float",
            "frozenset",
            "hash",
            "hex",
            "int",
            "isinstance",
            "issubclass",
            "iter",
            "len",
            "list",
            "map",
            "max",
            "min",
            "next",
            "object",
            "oct",
            "ord",
            "pow",
            "print",
            "range",
            "repr",
            "reversed",
            "round",
            "set",
            "slice",
            "sorted",
            "str",
            "sum",
            "tuple",
            "zip",
        ]
    ),
    "collections": frozenset(("Counter", "OrderedDict", "defaultdict", "deque")),
    "datetime": frozenset(("date", "datetime", "time", "timedelta")),
    "decimal": frozenset(("Decimal",)),
    "fractions": frozenset(("Fraction",)),
    "functools": frozenset(("cmp_to_key", "reduce")),
    "operator": frozenset(
        [
            "add",
            "and_",
            "eq",
            "floordiv",
            "ge",
            "gt",
            "itemgetter",
            "le",
            "lt",
            "mod",
            "mul",
            "ne",
            "neg",
            "not_",
            "or_",
            "pow",
            "sub",
            "truediv",
            "xor",
        ]
    ),
    **dict.fromkeys(("bisect", "cmath", "heapq", "itertools", "math")),
}
"""Functions and classes that go by name; None means all of a module. None of them reads an attribute by its name, opens
a file or runs code: the code may hand them to a function of the test."""


CATCH_ALL = (BaseException, Exception, AssertionError)
"""A test that catches one of these under a name of the code's would catch its own failures."""


class ProtocolError(BaseException):
    """The other process sent something that is no message. No test may catch this as an exception of the code."""


class ReferenceTable(Protocol):
    """How objects that stay in their process are written and read."""

    def write(self, value: Any) -> list[Any]: ...

    def read(self, written: list[Any]) -> Any: ...


class Codec:
    """The state of one connection. New ids are even in the test's process and odd in the other."""

    def __init__(self, references: ReferenceTable, *, is_test: bool) -> None:
        self._references = references
        self._is_test = is_test
        self._next = 0 if is_test else 1
        self.is_frozen = False
        """No shared container may change now: the test may be in the middle of a loop over it."""
        self._shared: dict[int, Any] = {}
        self._ids: dict[int, int] = {}
        self._sent: dict[int, Any] = {}
        """The elements of each shared container when both processes last agreed."""

    def write(self, value: Any) -> dict[str, Any]:
        """A message with the value, and with all changes of shared containers."""
        dropped = self._drop_garbage()
        message: dict[str, Any] = {"value": self._write(value), "shared": {}, "dropped": dropped}
        while changed := [number for number in self._shared if self._has_changed(number)]:
            for number in changed:
                container = self._shared[number]
                self._sent[number] = _elements(container)
                message["shared"][number] = [_kind(container), self._contents(container)]
        return message

    def read(self, message: Any) -> Any:
        try:
            for number in message["dropped"]:
                self._drop(number)
            contents = {int(number): given for number, given in message["shared"].items()}
            if self.is_frozen and not self._shared.keys().isdisjoint(contents):
                raise ProtocolError("the code changed a container while the test looked at it")
            for number, (kind, _) in contents.items():
                if number not in self._shared:
                    self._register(number, SHARED[kind]())
                    self._sent[number] = _elements(self._shared[number])  # a hash may be asked for before it is filled
            filled = {number: self._shared[number] for number in contents}  # so that none is garbage before that
            for number, (_, elements) in contents.items():
                self._fill(filled[number], elements)
                self._sent[number] = _elements(filled[number])
            return self._read(message["value"])
        except Exception as wrong:  # noqa: BLE001 - a test must not take it for an exception of the code
            raise ProtocolError(f"a message could not be read: {type(wrong).__name__}") from None

    def _write(self, value: Any) -> Any:
        kind = type(value)
        if kind is int:
            return value if -LARGEST_NUMBER < value < LARGEST_NUMBER else ["int", hex(value)]
        if kind in ATOMS:
            return value
        if _kind(value):
            return ["shared", self._id_of(value)]
        if kind in (tuple, frozenset):
            return [kind.__name__, self._write_all(value)]
        if kind in WRITERS:
            return [kind.__name__, *WRITERS[kind](value)]
        if kind in (range, slice):
            return [kind.__name__, self._write_all((value.start, value.stop, value.step))]
        if kind.__module__ == "numpy" and (array := _array(value)):
            return array
        if known := _known_name(value):
            return known
        return self._references.write(value)

    def _write_all(self, values: Any) -> list[Any]:
        if all(type(value) in (float, str) for value in values):
            return list(values)
        return [self._write(value) for value in values]

    def _contents(self, container: Any) -> Any:
        if isinstance(container, bytearray):
            return base64.b64encode(container).decode()
        if isinstance(container, dict):
            return [[self._write(key), self._write(value)] for key, value in container.items()]
        return self._write_all(container)

    def _fill(self, container: Any, contents: Any) -> None:
        if isinstance(container, bytearray):
            container[:] = base64.b64decode(contents)
            return
        if isinstance(container, dict):
            items: Any = {self._read(key): self._read(value) for key, value in contents}
        else:
            items = (set if isinstance(container, set) else list)(map(self._read, contents))
        container.clear()
        (container.update if isinstance(container, dict | set) else container.extend)(items)

    def _read(self, written: Any) -> Any:
        if type(written) in ATOMS:
            return written
        tag, *rest = written
        if tag == "shared":
            return self._shared[rest[0]]
        if tag in ("tuple", "frozenset"):
            elements = [self._read(element) for element in rest[0]]
            return tuple(elements) if tag == "tuple" else frozenset(elements)
        if tag in ("range", "slice"):
            bounds = [self._read(bound) for bound in rest[0]]
            return range(*bounds) if tag == "range" else slice(*bounds)
        value = READERS[tag](*rest) if tag in READERS else self._references.read(written)
        if self._is_test and any(value is kind for kind in CATCH_ALL):
            raise ProtocolError(f"the code gave the test {value.__name__}, which catches the test's own failures")
        return value

    def _id_of(self, container: Any) -> int:
        number = self._ids.get(id(container))
        if number is None:
            number, self._next = self._next, self._next + 2
            self._register(number, container)
        return number

    def _register(self, number: int, container: Any) -> None:
        self._shared[number] = container
        self._ids[id(container)] = number

    def _has_changed(self, number: int) -> bool:
        if number not in self._sent:
            return True
        now, before = _elements(self._shared[number]), self._sent[number]
        if isinstance(now, bytes):
            return bool(now != before)
        return len(now) != len(before) or not all(map(is_, now, before))

    def _drop_garbage(self) -> list[int]:
        """Containers that only this table refers to; nobody here can see them change."""
        self._sent = {number: sent for number, sent in self._sent.items() if number in self._shared}
        dropped = [number for number in self._shared if sys.getrefcount(self._shared[number]) <= 2]
        for number in dropped:
            self._drop(number)
        return dropped

    def _drop(self, number: int) -> None:
        container = self._shared.pop(number, None)
        self._ids.pop(id(container), None)
        self._sent.pop(number, None)


def _kind(value: Any) -> str:
    """The name of a shared container's type; empty if the value is none."""
    kind = type(value)
    if kind.__name__ == "defaultdict" and kind.__module__ == "collections":
        return "dict"
    return kind.__name__ if SHARED.get(kind.__name__) is kind else ""


def _elements(container: Any) -> Any:
    if isinstance(container, bytearray):
        return bytes(container)
    if isinstance(container, dict):
        return (*container.keys(), *container.values())
    return tuple(container)


def _known_name(value: Any) -> list[Any] | None:
    """A reference by name to a function, class or module that both processes have."""
    if isinstance(value, ModuleType):
        return ["module", value.__name__] if value.__name__ in KNOWN_MODULES else None
    if not isinstance(value, type | FunctionType | BuiltinFunctionType):
        return None
    module, name = str(getattr(value, "__module__", "")).removeprefix("_"), getattr(value, "__qualname__", "")
    is_known = module in sys.modules and _is_known(module, name) and getattr(sys.modules[module], name, None) is value
    return ["known", module, name] if is_known else None


def _is_known(module: str, name: str) -> bool:
    if module not in KNOWN or name.startswith("_"):
        return False
    names = KNOWN[module]
    return (names is None or name in names) or (module == "builtins" and _is_exception(name))


def _is_exception(name: str) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, Exception)


def _known(module: str, name: str) -> Any:
    found = getattr(import_module(module), name) if _is_known(module, name) else None
    if not callable(found):
        raise ProtocolError("a name that is not in both processes")
    return found


def _module(name: str) -> ModuleType:
    if name not in KNOWN_MODULES:
        raise ProtocolError(f"the module {name!r} is not in both processes")
    return import_module(name)


def _array(value: Any) -> list[Any] | None:
    """Arrays and scalars of NumPy, without those of Python objects."""
    numpy: Any = sys.modules["numpy"]
    if type(value) is not numpy.ndarray and not isinstance(value, numpy.generic):
        return None
    array = numpy.asarray(value)
    if array.dtype.hasobject or array.dtype.names:
        return None
    return ["array", array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]


def _read_array(dtype: str, shape: list[int], data: str) -> Any:
    numpy: Any = import_module("numpy")
    if numpy.dtype(dtype).hasobject:
        raise ProtocolError("an array of objects")
    return numpy.frombuffer(base64.b64decode(data), numpy.dtype(dtype)).reshape(shape).copy()[()]


WRITERS: dict[type, Callable[[Any], list[Any]]] = {
    complex: lambda value: [value.real, value.imag],
    bytes: lambda value: [base64.b64encode(value).decode()],
    Fraction: lambda value: [hex(value.numerator), hex(value.denominator)],
    Decimal: lambda value: [str(value)],
    timedelta: lambda value: [value.days, value.seconds, value.microseconds],
    type(...): lambda _: [],
    **{kind: lambda value: [value.isoformat()] for kind in DATES.values()},
}
READERS: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "complex": complex,
    "bytes": base64.b64decode,
    "Fraction": lambda numerator, denominator: Fraction(int(numerator, 16), int(denominator, 16)),
    "Decimal": Decimal,
    "timedelta": timedelta,
    "ellipsis": lambda: ...,
    **{name: kind.fromisoformat for name, kind in DATES.items()},
    "array": _read_array,
    "known": _known,
    "module": _module,
}
