"""Messages as bytes, without pickle: one part in msgpack, then the arrays as they are in memory.

A peer may send any bytes. It gets no more than an error for them, because

- only the types of message_types.py are written and read. A class must be registered in message_format.py; the reader
  imports no module that a message names, and checks the values of the fields before it calls a constructor.
- the msgpack part has a largest size, and nothing is allocated for elements that are not there.
- a hash that many keys share cannot be sent (message_types.KEYS).

In msgpack, an array whose first element is an extension is an object: the extension says of which kind. Fields that the
reader does not know are left out, those that it lacks get their default, as in message_format.py.
"""

import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from enum import Enum
from functools import lru_cache, partial
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from msgpack import ExtType, Packer, Unpacker, unpackb
from numpy.typing import NDArray

from stepwell.common.message_format import (
    FORMAT,
    MESSAGES,
    OWN_FORMS,
    Check,
    check_complete,
    constructor,
    field_fits,
    field_names,
    incompatible,
    is_key,
    misfit,
)
from stepwell.errors import IncompatibleMessage, StepwellError

HOMES = tuple(
    f"stepwell.{module}"
    for module in (
        *("pool.api.calls", "pool.api.leasing", "pool.api.news"),
        *("pool.api.pacing", "pool.api.plan", "pool.api.policy", "pool.api.preview", "pool.api.producing"),
        *("pool.api.scoring", "pool.api.series"),
        *("pool.api.sessions", "pool.api.shard_layout", "pool.api.stats"),
        *("pool.api.transport", "pool.api.watching", "pool.client.link_messages"),
        *("pool.slices.calls", "pool.slices.curation", "pool.slices.forgetting", "pool.slices.policy"),
        *("pool.slices.scoring", "pool.slices.sessions", "pool.slices.steps", "pool.slices.trajectories"),
        *("pool.slices.watching", "steps.columns", "steps.left_out"),
        *("steps.returns", "steps.step", "steps.step_filter"),
    )
)
"""The modules of all classes that travel. A process may be sent a class of which it has not imported the module yet."""

MOST_PACKED = 2**27
"""The most bytes of the msgpack part."""
MOST_ARRAYS = 2**17
MOST_NAMES = 2**14
"""Bytes of the names of one class's fields."""
UNCHECKED = 2**14
"""Bytes of a msgpack part that is read at once. A larger one is first looked through for elements that are announced
and missing: nested arrays could announce a million elements each in a few bytes."""
MOST_COMBINATIONS = 256
UNFIT = (ValueError, TypeError, KeyError, AttributeError, IndexError)
"""The exceptions that a constructor raises for values that it does not expect."""

# The kinds of extensions.
CLASS, SEEN, FAILURE, TUPLE, SET, FROZENSET, COUNTER, ENUM, ARRAY, NUMBER, BIG_INT = range(11)
DTYPES = tuple(map(np.dtype, ("|b1", "<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8")))
ARRAY_1D = struct.Struct("<BIQ")
"""The dtype, the number of the array in its message, and its length."""
ARRAY_HEAD = struct.Struct("<BI")
SEPARATOR = "\0"


class MalformedMessage(ConnectionError):
    """Bytes that are no message. Who sent them is not listened to any more."""


def pack_message(message: object) -> list[bytes | memoryview]:
    """The msgpack part, then the arrays. TypeError if something in it cannot travel."""
    try:
        return _Writer().pack(message, "strict")
    except UnicodeEncodeError:  # half a surrogate pair, as JSON may have
        return _Writer().pack(message, "surrogatepass")


def unpack_message(parts: Sequence[bytes | memoryview]) -> Any:
    """Decodes a message; its arrays are read-only views of its parts.

    MalformedMessage for bytes that no Stepwell sends; IncompatibleMessage for those of another release.
    """
    packed = parts[0]
    if len(packed) > MOST_PACKED or len(parts) > MOST_ARRAYS:
        raise MalformedMessage(f"a message of {len(parts)} parts, the first of {len(packed)} bytes")
    try:
        if len(packed) > UNCHECKED:
            _check_all_is_there(packed)
        try:
            return _Reader(parts).read(strict_map_key=True)
        except ValueError:  # keys that are no text, or half a surrogate pair: both are rare
            reader = _Reader(parts)
            return reader.read(strict_map_key=False, object_pairs_hook=_checked_mapping, unicode_errors="surrogatepass")
    except (StepwellError, MalformedMessage):
        raise
    except Exception as failure:  # noqa: BLE001 - whatever they make of our code, they are no message
        raise MalformedMessage(f"{type(failure).__name__}: {failure}") from None


def _check_all_is_there(packed: bytes | memoryview) -> None:
    unpacker = Unpacker(max_buffer_size=0)
    unpacker.feed(packed)
    unpacker.skip()


# -- writing -----------------------------------------------------------------------------------------------------------

Write = Callable[["_Writer", Any], Any]
"""A function that makes what msgpack writes in place of an object."""


class _Writer:
    def __init__(self) -> None:
        self.arrays: list[bytes | memoryview] = []
        self._seen: dict[type, ExtType] = {}

    def pack(self, message: object, unicode_errors: str) -> list[bytes | memoryview]:
        on_unicode = None if unicode_errors == "strict" else unicode_errors
        packer = Packer(default=self._write, strict_types=True, buf_size=1024, unicode_errors=on_unicode)
        packed: bytes = packer.pack(message)
        return [packed, *self.arrays]

    def mark(self, cls: type, names: ExtType) -> ExtType:
        """The names of a class's fields are sent once in a message."""
        mark = self._seen.get(cls)
        if mark is not None:
            return mark
        if len(self._seen) < 256:
            self._seen[cls] = ExtType(SEEN, bytes([len(self._seen)]))
        return names

    def _write(self, value: Any) -> Any:
        write = WRITERS.get(type(value))
        if write is None:
            write = WRITERS[type(value)] = _writer_of(type(value))
        return write(self, value)


def _write_array(writer: _Writer, array: NDArray[Any]) -> ExtType:
    code = DTYPE_CODES.get(array.dtype)
    if code is None:
        raise TypeError(f"arrays of {array.dtype} cannot travel")
    index = len(writer.arrays)
    shape = array.shape
    writer.arrays.append(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    if len(shape) == 1:
        return ExtType(ARRAY, ARRAY_1D.pack(code, index, shape[0]))
    return ExtType(ARRAY, ARRAY_HEAD.pack(code, index) + struct.pack(f"<{len(shape)}Q", *shape))


def _write_number(writer: _Writer, number: Any) -> ExtType:
    code = DTYPE_CODES.get(number.dtype)
    if code is None:
        raise TypeError(f"{type(number).__name__} cannot travel")
    return ExtType(NUMBER, bytes([code]) + number.tobytes())


def _write_int(writer: _Writer, number: int) -> ExtType:
    """Only integers beyond 64 bits come here."""
    return ExtType(BIG_INT, number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True))


def _write_failure(writer: _Writer, failure: Exception) -> list[Any]:
    """Writes a failure by all names under which a reader may know it, as its base in an older release."""
    names = [cls.__name__ for cls in type(failure).__mro__ if MESSAGES.get(cls.__name__) is cls]
    if not names:
        return [ExtType(FAILURE, b"ActorFailed"), f"{type(failure).__name__}: {failure}"]
    args: Any = failure.__reduce__()[1]
    return [ExtType(FAILURE, SEPARATOR.join(names).encode()), *map(str, args)]


def _elements_writer(kind: int) -> Write:
    mark = ExtType(kind, b"")
    return lambda writer, elements: [mark, *elements]


def _writer_of(cls: type) -> Write:
    if MESSAGES.get(cls.__name__) is cls and not issubclass(cls, Exception):
        return _enum_writer(cls) if issubclass(cls, Enum) else _message_writer(cls)
    if issubclass(cls, Enum) or hasattr(cls, "_fields"):
        raise TypeError(f"{cls} cannot travel: give the class @message, or @sent (common/message_format.py)")
    for base, write in BASES.items():
        if issubclass(cls, base):
            return write
    raise TypeError(f"{cls} cannot travel")


def _enum_writer(cls: type[Enum]) -> Write:
    marks = {member.name: ExtType(ENUM, f"{cls.__name__}{SEPARATOR}{member.value}".encode()) for member in cls}
    return lambda writer, member: marks[member._name_]


def _message_writer(cls: Any) -> Write:
    own = OWN_FORMS.get(cls)
    names = () if own is not None else field_names(cls)
    named = ExtType(CLASS, SEPARATOR.join((cls.__name__, str(FORMAT), *names)).encode())
    if own is not None:
        return lambda writer, value: [writer.mark(cls, named), own.values(value)]
    if issubclass(cls, tuple):
        return lambda writer, value: [writer.mark(cls, named), *value]
    if len(names) > 1:
        values = attrgetter(*names)
        return lambda writer, value: [writer.mark(cls, named), *values(value)]
    return lambda writer, value: [writer.mark(cls, named), *(getattr(value, name) for name in names)]


DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
BASES: Mapping[Any, Write] = {
    Exception: _write_failure,
    np.generic: _write_number,
    np.ndarray: _write_array,
    Counter: lambda writer, counts: [ExtType(COUNTER, b""), dict(counts)],
    Mapping: lambda writer, mapping: dict(mapping),
    str: lambda writer, text: str.__str__(text),
    int: lambda writer, number: int(number),
    float: lambda writer, number: float(number),
    tuple: _elements_writer(TUPLE),
    frozenset: _elements_writer(FROZENSET),
    Set: _elements_writer(SET),
    Sequence: lambda writer, elements: list(elements),
}
"""How classes are written that msgpack does not know."""
WRITERS: dict[type, Write] = {int: _write_int}


# -- reading -----------------------------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """The first element of an array that is an object."""

    make: Callable[[list[Any]], object]
    """The object, of the other elements."""


class _Reader:
    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self._parts = parts
        self._seen: list[_Form] = []
        self._forms = 0
        """The number of forms that are not the first element of their array yet."""

    def read(self, **options: Any) -> Any:
        message = unpackb(self._parts[0], list_hook=self._list, ext_hook=self._extension, timestamp=1, **options)
        if self._forms:
            raise MalformedMessage("an object without its array")
        return message

    def _list(self, elements: list[Any]) -> object:
        if elements and type(elements[0]) is _Form:
            self._forms -= 1
            return elements.pop(0).make(elements)
        return elements

    def _extension(self, code: int, data: bytes) -> object:
        if code == ENUM:
            return _member(data)
        if code == ARRAY:
            return self._array(data)
        if code == SEEN:
            form = self._seen[data[0]]
        elif code == CLASS:
            form = _form(data)
            self._seen.append(form)
        elif code == FAILURE:
            form = _failure_form(data)
        elif code in FORMS:
            form = FORMS[code]
        else:
            return _number(code, data)
        self._forms += 1
        return form

    def _array(self, data: bytes) -> Any:
        if len(data) == ARRAY_1D.size:
            code, index, shape = ARRAY_1D.unpack(data)
            length = shape
        else:
            code, index = ARRAY_HEAD.unpack_from(data)
            shape = [length for (length,) in struct.iter_unpack("<Q", data[ARRAY_HEAD.size :])]
            length = math.prod(shape)
        part, dtype = self._parts[1 + index], DTYPES[code]
        if length * dtype.itemsize != len(part):
            raise MalformedMessage(f"an array of {shape} in {len(part)} bytes")
        return np.ndarray(shape, dtype, part)


def _number(code: int, data: bytes) -> Any:
    if code == BIG_INT:
        return int.from_bytes(data, "little", signed=True)
    if code == NUMBER:
        (number,) = np.frombuffer(data[1:], DTYPES[data[0]])
        return number
    raise MalformedMessage(f"an extension of kind {code}")


def _checked_mapping(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    mapping_keys = [key for key, _ in pairs]
    if not all(map(_is_safe_key, mapping_keys)):
        raise MalformedMessage("a mapping with keys that cannot travel")
    return dict(pairs)


def _is_safe_key(key: object) -> bool:
    return is_key(key) and (type(key) is not int or -(2**63) <= key < 2**64)


def _checked_elements(make: Callable[[list[Any]], object]) -> _Form:
    def made(elements: list[Any]) -> object:
        if not all(map(_is_safe_key, elements)):
            raise MalformedMessage("a set with elements that cannot travel")
        return make(elements)

    return _Form(made)


def _counter(elements: list[Any]) -> object:
    (counts,) = elements
    if type(counts) is not dict:
        raise MalformedMessage("a Counter without counts")
    return Counter(counts)


FORMS = {
    TUPLE: _Form(tuple),
    SET: _checked_elements(set),
    FROZENSET: _checked_elements(frozenset),
    COUNTER: _Form(_counter),
}


@lru_cache(maxsize=1024)
def _member(data: bytes) -> Enum:
    name, _, value = data.decode().partition(SEPARATOR)
    cls = _registered(name)
    if cls is None or not issubclass(cls, Enum):
        raise incompatible(name, FORMAT)
    for member in cls:
        if str(member.value) == value:
            return member
    raise IncompatibleMessage(f"this Stepwell knows no {name} {value!r}: its sender is of a newer release")


@lru_cache(maxsize=1024)
def _failure_form(data: bytes) -> _Form:
    names = _names(data)
    for cls in filter(None, map(_registered, names)):
        if issubclass(cls, Exception):
            return _Form(_maker(cls, partial(_failure, cls)))
    raise incompatible(names[0], FORMAT)


def _failure(cls: type[Exception], args: list[Any]) -> Exception:
    if not {str}.issuperset(map(type, args)):
        raise TypeError("an error is made of texts")
    return cls(*args)


@lru_cache(maxsize=1024)
def _form(data: bytes) -> _Form:
    """The form of a class, the same for all messages of a sender."""
    name, sent_format, *names = _names(data)
    cls: Any = _registered(name)
    if cls is None or int(sent_format) > FORMAT or issubclass(cls, Enum | Exception):
        raise incompatible(name, int(sent_format))
    if (own := OWN_FORMS.get(cls)) is not None:
        return _Form(_maker(cls, lambda elements: own.read(*elements)))
    return _Form(_ClassReader(cls, names).make)


class _ClassReader:
    def __init__(self, cls: Any, names: list[str]) -> None:
        """`names` are those of the fields that the sender sends."""
        fits = field_fits(cls)
        check_complete(cls, set(names))
        self._cls = cls
        self._count = len(names)
        known = [name for name in names if name in fits]
        if len(set(known)) < len(known):
            raise MalformedMessage(f"a {cls.__name__} that has a field twice")
        self._known = None if known == names else [at for at, name in enumerate(names) if name in fits]
        self._fits = [(name, fits[name]) for name in known]
        self._checks: dict[tuple[type, ...], list[tuple[str, int, Check]]] = {}
        """The checks by the classes of the values: those that must be looked at."""
        self._construct = constructor(cls, known)

    def make(self, values: list[Any]) -> object:
        if len(values) != self._count:
            raise MalformedMessage(f"a {self._cls.__name__} with {len(values)} values for {self._count} fields")
        if self._known is not None:
            values = [values[at] for at in self._known]
        kinds = tuple(map(type, values))
        checks = self._checks.get(kinds)
        if checks is None:
            checks = self._learn(kinds)
        for name, at, check in checks:
            if not check(values[at]):
                raise IncompatibleMessage(f"{self._cls.__name__}.{name} cannot be what another process sent")
        try:
            return self._construct(values)
        except UNFIT as failure:
            raise misfit(self._cls, failure) from None

    def _learn(self, kinds: tuple[type, ...]) -> list[tuple[str, int, Check]]:
        if len(self._checks) >= MOST_COMBINATIONS:
            self._checks.clear()
        found = enumerate(zip(self._fits, kinds, strict=True))
        looked_at = [(name, at, check) for at, ((name, fit), kind) in found if (check := fit.check_of(kind))]
        self._checks[kinds] = looked_at
        return looked_at


def _maker(cls: type, make: Callable[[list[Any]], object]) -> Callable[[list[Any]], object]:
    def made(values: list[Any]) -> object:
        try:
            return make(values)
        except UNFIT as failure:
            raise misfit(cls, failure) from None

    return made


def _names(data: bytes) -> list[str]:
    if len(data) > MOST_NAMES:
        raise MalformedMessage("names that are too long")
    return data.decode().split(SEPARATOR)


def _registered(name: str) -> type | None:
    if name not in MESSAGES:
        _import_homes()
    return MESSAGES.get(name)


@lru_cache(maxsize=1)
def _import_homes() -> None:
    for home in HOMES:
        import_module(home)
