"""Values as lines of JSON, between the process of the code, which is hostile, and that of its test.

- A value is None, a bool, a number, a text, a list, or what the tables name; it goes by its content, and so does an
  object of a class that is derived from one of these. What is changed in one process stays as it was in the other.
- `from_json` executes nothing of the other process: it makes values of Python's own types, of bounded depth, or raises.
- An object with one key is a tagged value, {tag: [parts]}; a list is a list. There is no other form.
- A question over a LineChannel is [operation, arguments]. A reply is [outcome, content, changed, printed]:

| outcome | content |
|---|---|
| `value` | what the code returned |
| `raise` | the name of a built-in exception, and its arguments |
| `object` | in words, what the code returned that is no value |

`changed` is the arguments as the call left them, or None if it changed none; `printed` is what the code printed.
"""

import json
import math
import socket
from collections import deque
from collections.abc import Callable, Iterable
from importlib import import_module
from itertools import islice
from re import fullmatch
from typing import Any

DEEPEST = 100
MOST_ITEMS = 1_000_000
"""Items of an iterator, which is read to its end."""
MOST_DIGITS = 100_000
"""Hexadecimal digits of an integer."""
SAME = frozenset((type(None), bool, str))
LEAVES = SAME | {int, float}
SHORT_NUMBER = 2**63
"""Python reads only short decimal numbers; longer ones are hexadecimal."""
ARRAY_TYPE = "[<>|=][biufcU][0-9]{1,6}"
"""The types of arrays without Python objects and without fields, as NumPy writes them."""
ITERATING_MODULES = ("builtins", "itertools", "collections")
"""An iterator of another module may be a file or a connection."""


class Unsayable(Exception):
    """An object is no value; the text says what it is."""

    def __init__(self, what: str, value: Any = None) -> None:
        super().__init__(what)
        self.value = value


class TooLargeValue(Unsayable):
    """A value, but a larger one than may leave its process."""


def to_json(value: Any, depth: int = 0) -> Any:
    """Unsayable says why there is none."""
    kind = type(value)
    if kind in SAME or (kind is int and -SHORT_NUMBER < value < SHORT_NUMBER):
        return value
    for atom, write in ATOMS.items():
        if issubclass(kind, atom):
            return write(value)
    if depth > DEEPEST:
        raise TooLargeValue(f"a value that is nested more than {DEEPEST} levels deep")
    if issubclass(kind, list):
        return _parts_to_json(list.__iter__(value), depth)
    for base in kind.__mro__:
        if parts_of := WRITERS.get(f"{base.__module__}.{base.__qualname__}"):
            return {base.__qualname__: _parts_to_json(parts_of(value), depth)}
    if kind.__module__ in ITERATING_MODULES and hasattr(kind, "__next__"):
        return {"iterator": _parts_to_json(_items(value), depth)}
    if kind.__module__ == "numpy" and hasattr(kind, "item"):
        return to_json(value.item(), depth + 1)
    raise Unsayable(f"an object of class {kind.__name__}", value)


def from_json(written: Any, depth: int = 0) -> Any:
    """Exceptions of many classes, if it is not what `to_json` writes."""
    if type(written) in LEAVES:
        return written
    if depth > DEEPEST:
        raise ValueError("a value is nested too deeply")
    if type(written) is list:
        return [item if type(item) in LEAVES else from_json(item, depth + 1) for item in written]
    ((tag, parts),) = written.items()
    if type(parts) is not list:
        raise ValueError("a value without parts")
    return READERS[tag](from_json(parts, depth))


def _parts_to_json(parts: Iterable[Any], depth: int) -> list[Any]:
    return [part if type(part) in SAME else to_json(part, depth + 1) for part in parts]


def _integer(value: int) -> Any:
    number = int.__pos__(value)
    if abs(number) < SHORT_NUMBER:
        return number
    if number.bit_length() > 4 * MOST_DIGITS:
        raise TooLargeValue("a number that is too long")
    return {"int": [hex(number)]}


def _float(value: float) -> Any:
    number = float.__pos__(value)
    return number if math.isfinite(number) else {"float": [repr(number)]}


def _items(iterator: Any) -> list[Any]:
    items = list(islice(iterator, MOST_ITEMS + 1))
    if len(items) > MOST_ITEMS:
        raise TooLargeValue(f"an iterator over more than {MOST_ITEMS:,} items")
    return items


def _array(array: Any) -> tuple[Any, ...]:
    if not fullmatch(ARRAY_TYPE, array.dtype.str):
        raise Unsayable(f"an array of type {array.dtype}")
    return array.dtype.str, list(array.shape), array.ravel().tolist()


def _read_array(parts: list[Any]) -> Any:
    kind, shape, items = parts
    if not fullmatch(ARRAY_TYPE, kind):
        raise ValueError("no type of an array")
    return import_module("numpy").array(items, kind).reshape(shape)


def _read_integer(parts: list[Any]) -> int:
    (digits,) = parts
    if len(digits) > MOST_DIGITS + 3:
        raise ValueError("a number is too long")
    return int(digits, 16)


def _late(module: str, *names: str) -> Callable[[list[Any]], Any]:
    """A reader of a module that is imported when the first of its values comes."""

    def read(parts: list[Any]) -> Any:
        make: Any = import_module(module)
        for name in names:
            make = getattr(make, name)
        return make(*parts)

    return read


ATOMS: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: _integer, float: _float}
WRITERS: dict[str, Callable[[Any], Iterable[Any]]] = {
    **dict.fromkeys(("builtins.tuple", "builtins.set", "builtins.frozenset", "collections.deque"), iter),
    "builtins.dict": lambda value: (list(dict.keys(value)), list(dict.values(value))),
    **dict.fromkeys(("builtins.dict_keys", "builtins.dict_values", "builtins.dict_items"), list),
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    **dict.fromkeys(("builtins.bytes", "builtins.bytearray"), lambda value: [value.hex()]),
    "builtins.complex": lambda value: (value.real, value.imag),
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    **dict.fromkeys(("datetime.datetime", "datetime.date", "datetime.time"), lambda value: [value.isoformat()]),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "numpy.ndarray": _array,
}
"""The writers by class: each gives the parts that a value is made of again. The class's name is the tag."""
READERS: dict[str, Callable[[list[Any]], Any]] = {
    "int": _read_integer,
    "float": lambda parts: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[parts[0]],
    **{kind.__name__: kind for kind in (tuple, set, frozenset, deque)},
    "dict": lambda parts: dict(zip(*parts, strict=True)),
    "dict_keys": lambda parts: dict.fromkeys(parts).keys(),
    "dict_values": lambda parts: dict(enumerate(parts)).values(),
    "dict_items": lambda parts: dict(parts).items(),
    "range": lambda parts: range(*parts),
    "bytes": lambda parts: bytes.fromhex(*parts),
    "bytearray": lambda parts: bytearray.fromhex(*parts),
    "complex": lambda parts: complex(*parts),
    "iterator": iter,
    "Decimal": _late("decimal", "Decimal"),
    "Fraction": _late("fractions", "Fraction"),
    **{name: _late("datetime", name, "fromisoformat") for name in ("datetime", "date", "time")},
    "timedelta": _late("datetime", "timedelta"),
    "ndarray": _read_array,
}


MOST_BYTES = 2**24
"""Bytes of a message."""
MOST_PARTS = 2_000_000
"""Lists and parts of lists in a message; each takes a multiple of its bytes in memory."""


class Ended(Exception):
    """The other process has ended."""


class LineChannel:
    def __init__(self, descriptor: int) -> None:
        self._lines = socket.socket(fileno=descriptor).makefile("rwb")

    def send(self, message: Any) -> None:
        """ValueError if it is too long."""
        line = json.dumps(message, allow_nan=False).encode()
        if len(line) >= MOST_BYTES or _parts(line) > MOST_PARTS:
            raise ValueError("a value is too large to leave its process")
        try:
            self._lines.write(line + b"\n")
            self._lines.flush()
        except OSError:
            raise Ended from None

    def receive(self) -> Any:
        """ValueError if it is too long or no JSON."""
        try:
            line = self._lines.readline(MOST_BYTES)
        except OSError:
            line = b""
        if not line:
            raise Ended
        if not line.endswith(b"\n") or _parts(line) > MOST_PARTS:
            raise ValueError("a message is too long, or has no end")
        return json.loads(line)


def _parts(line: bytes) -> int:
    return line.count(b",") + line.count(b"[")
