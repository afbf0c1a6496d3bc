"""The format of objects that processes of different releases send one another: objects by the name of their class,
values by field name.

- A field that the receiver does not know is left out; one that the sender does not know gets its default. So a field
  may be added at any place if it has a default, and a class may move to another module.
- A field is never renamed, and its meaning never changes. A class keeps its name.
- The sender's FORMAT travels with each object. It is raised if a message of before cannot be read by these rules.
- `field_fits` says which values fit the annotation of a field: a process must not make an object of whatever another
  one sends. It is as generous as the code that reads the fields: an integer fits where a float is expected, a list fits
  where a tuple is.

Between a link and its clients messages travel as message_codec.py writes them, elsewhere as pickles. `portable_actor`
keeps references to modules out of Ray's pickles of actor classes.
"""

import inspect
import typing
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from itertools import chain
from types import NoneType, UnionType
from typing import Any, ForwardRef, Literal, NamedTuple, TypeVar, get_args, get_origin

import numpy as np

from stepwell import errors
from stepwell.errors import IncompatibleMessage, StepwellError

C = TypeVar("C", bound=type)

FORMAT = 1
MESSAGES: dict[str, type] = {}
"""The registered classes by name."""

Check = Callable[[Any], bool]

INTEGERS: tuple[type, ...] = (int, bool, *(np.dtype(code).type for code in "bBhHiIlLqQ"))
FLOATS: tuple[type, ...] = (*INTEGERS, float, np.float16, np.float32, np.float64)
SCALARS: dict[Any, tuple[type, ...]] = {
    None: (NoneType,),
    NoneType: (NoneType,),
    str: (str,),
    bytes: (bytes,),
    bool: (bool, np.bool_),
    int: INTEGERS,
    float: FLOATS,
}
JSON_SCALARS: frozenset[type] = frozenset((str, int, float, bool, NoneType))
JSON_KINDS = JSON_SCALARS | {dict, list, tuple}
KEYS = frozenset((*JSON_SCALARS, bytes))
"""Keys of mappings and elements of sets, besides enums: a sender cannot make many of them with the same hash."""
ARRAY_KINDS = {"i": "iu", "u": "iu", "f": "f", "b": "b"}
SEQUENCES = (list, Sequence)
MAPPINGS = (dict, Mapping, Counter)
SETS = (set, frozenset, Set)


class OwnForm(NamedTuple):
    """How a class travels that is sent by other names than those of its fields."""

    values: Callable[[Any], dict[str, Any]]
    read: Callable[[dict[str, Any]], object]
    """ValueError, KeyError or TypeError if they do not fit. Names that it does not know are left out."""


OWN_FORMS: dict[type, OwnForm] = {}


def sent(cls: C) -> C:
    """Class decorator: an enum, an error or a named tuple that processes send one another; its pickles are Python's."""
    assert cls.__name__ not in MESSAGES, cls
    MESSAGES[cls.__name__] = cls
    return cls


def message(cls: C) -> C:
    """Class decorator: a dataclass or named tuple that processes send one another."""
    sent(cls)
    names = field_names(cls)

    def reduce(self: object) -> tuple[Callable[..., object], tuple[str, str, int, dict[str, object]]]:
        return restore, (cls.__name__, cls.__module__, FORMAT, {name: getattr(self, name) for name in names})

    cls.__reduce__ = reduce  # type: ignore[method-assign, assignment]
    return cls


def restore(name: str, module: str, sent_format: int, values: Mapping[str, object]) -> object:
    """Called by pickle. It stays in this module under this name: that is part of the format.

    `module` is where the sender has the class; it is read only if this process has not imported it yet.
    """
    if name not in MESSAGES:
        with suppress(ImportError):
            import_module(module)
    cls = MESSAGES.get(name)
    if cls is None or sent_format > FORMAT:
        raise incompatible(name, sent_format)
    known = {field: values[field] for field in field_names(cls) if field in values}
    check_complete(cls, known.keys())
    return cls(**known)


def check_complete(cls: type, names: Set[str]) -> None:
    """IncompatibleMessage if a field without a default is not among the names."""
    if lacking := sorted(_required(cls) - names):
        raise IncompatibleMessage(
            f"{cls.__name__} came without {', '.join(lacking)}: its sender is of an older release than this process "
            "can read"
        )


def incompatible(name: str, sent_format: int) -> IncompatibleMessage:
    return IncompatibleMessage(
        f"this Stepwell cannot read {name} of another one (message format {sent_format}, here {FORMAT}): "
        "bring the processes of the pool to the same release"
    )


def misfit(cls: type, failure: Exception) -> IncompatibleMessage:
    return IncompatibleMessage(f"{cls.__name__} cannot be what another process sent: {failure}")


@cache
def field_names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in _init_fields(cls)) if is_dataclass(cls) else cls._fields  # type: ignore[attr-defined]


@cache
def _required(cls: Any) -> set[str]:
    if not is_dataclass(cls):
        return set(cls._fields) - set(cls._field_defaults)
    return {f.name for f in _init_fields(cls) if f.default is MISSING and f.default_factory is MISSING}


def _init_fields(cls: Any) -> list["Field[Any]"]:
    return [field for field in fields(cls) if field.init]


def constructor(cls: Any, names: list[str]) -> Callable[[list[Any]], object]:
    """Makes an object of the values of these fields."""
    own_names = list(field_names(cls))
    if issubclass(cls, tuple) and names == own_names:
        make: Callable[[list[Any]], object] = cls._make
        return make
    if names == own_names and not any(field.kw_only for field in cls.__dataclass_fields__.values()):
        return lambda values: cls(*values)
    return lambda values: cls(**dict(zip(names, values, strict=True)))


for _error in vars(errors).values():
    if isinstance(_error, type) and issubclass(_error, StepwellError):
        sent(_error)


class Fit(NamedTuple):
    """The values of a type."""

    exact: frozenset[type] = frozenset()
    """Every object of one of these classes fits."""
    checks: Mapping[type, Check] = {}
    """An object of one of these classes fits if the function says so."""
    bases: tuple[type, ...] = ()
    """Every object of one of these classes, or of a subclass, fits."""

    def accepts(self, value: object) -> bool:
        check = self.check_of(type(value))
        return check is None or check(value)

    def check_of(self, kind: type) -> Check | None:
        """The check that objects of this class must pass; None if all fit."""
        if kind in self.exact or issubclass(kind, self.bases):
            return None
        return self.checks.get(kind, _refuse)

    def accepts_all(self, values: Any) -> bool:
        return self.exact.issuperset(map(type, values)) or all(map(self.accepts, values))


def _refuse(value: object) -> bool:
    return False


def is_key(value: object) -> bool:
    return type(value) in KEYS or isinstance(value, Enum)


def are_json(values: Collection[object]) -> bool:
    """Level by level: a peer may nest its values as deeply as it likes. A tuple counts as a list."""
    while not JSON_SCALARS.issuperset(kinds := set(map(type, values))):
        if not kinds <= JSON_KINDS:
            return False
        objects: list[Any] = [value for value in values if type(value) is dict]
        if not {str}.issuperset(map(type, chain.from_iterable(objects))):
            return False
        lists: list[Any] = [value for value in values if type(value) in (list, tuple)]
        values = [*chain.from_iterable(lists), *chain.from_iterable(map(dict.values, objects))]
    return True


def _is_json(value: object) -> bool:
    return are_json([value])


class Json:
    """The stand-in for the alias of this name, which is recursive."""


ANYTHING = Fit(bases=(object,))


JSON = Fit(JSON_SCALARS, {dict: _is_json, list: _is_json, tuple: _is_json})


@cache
def field_fits(cls: type) -> dict[str, Fit]:
    """The fit of each field of a registered class, by the field's name."""
    hints = typing.get_type_hints(cls, localns={"Json": Json})
    return {name: fit(hints[name]) for name in field_names(cls)}


def fit(annotation: Any) -> Fit:
    """TypeError if values of this type cannot travel."""
    if annotation is Any or annotation is object:
        return ANYTHING
    if annotation is Json or (isinstance(annotation, ForwardRef) and annotation.__forward_arg__ == "Json"):
        return JSON
    if annotation in SCALARS:
        return Fit(frozenset(SCALARS[annotation]), bases=(str,) if annotation is str else ())
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is not None:
        return _generic_fit(annotation, origin, args)
    if isinstance(annotation, type) and (MESSAGES.get(annotation.__name__) is annotation or annotation is Exception):
        return Fit(frozenset((annotation,)), bases=(annotation,))
    raise _cannot_travel(annotation)


def _generic_fit(annotation: Any, origin: Any, args: tuple[Any, ...]) -> Fit:
    if origin in (typing.Union, UnionType):
        return _union([fit(arg) for arg in args])
    if origin is Literal:
        return Fit(frozenset(map(type, args)))
    if origin is np.ndarray:
        return Fit(checks={np.ndarray: _array_check(args[1])})
    if origin is tuple:
        return _tuple_fit(args)
    if origin in SEQUENCES:
        return _elements_fit((list, tuple), fit(args[0]))
    if origin in MAPPINGS:
        return _mapping_fit(fit(args[0]), fit(args[1]) if len(args) > 1 else fit(int))
    if origin in SETS:
        return _elements_fit((set, frozenset), fit(args[0]))
    raise _cannot_travel(annotation)


def _elements_fit(containers: tuple[type, ...], elements: Fit) -> Fit:
    if elements is ANYTHING:
        return Fit(frozenset(containers))
    return Fit(checks=dict.fromkeys(containers, elements.accepts_all))


def _union(fits: Sequence[Fit]) -> Fit:
    def check_of(kind: type) -> Check:
        checks = [one.checks[kind] for one in fits if kind in one.checks]
        return checks[0] if len(checks) == 1 else lambda value: any(check(value) for check in checks)

    return Fit(
        exact=frozenset(chain.from_iterable(one.exact for one in fits)),
        checks={kind: check_of(kind) for kind in {kind for one in fits for kind in one.checks}},
        bases=tuple(dict.fromkeys(chain.from_iterable(one.bases for one in fits))),
    )


def _tuple_fit(args: tuple[Any, ...]) -> Fit:
    if args[-1] is Ellipsis:
        return _elements_fit((list, tuple), fit(args[0]))
    parts = [fit(arg) for arg in args]

    def check(values: Any) -> bool:
        return len(values) == len(parts) and all(one.accepts(value) for one, value in zip(parts, values, strict=True))

    return Fit(checks=dict.fromkeys((list, tuple), check))


def _mapping_fit(keys: Fit, values: Fit) -> Fit:
    def check(mapping: Any) -> bool:
        return keys.accepts_all(mapping) and (values is ANYTHING or values.accepts_all(mapping.values()))

    return Fit(checks=dict.fromkeys((dict, Counter), check))


def _array_check(dtype: Any) -> Check:
    kinds = ARRAY_KINDS[np.dtype(get_args(dtype)[0]).kind]
    return lambda array: array.dtype.kind in kinds


def _cannot_travel(annotation: Any) -> TypeError:
    return TypeError(f"{annotation} cannot travel: give the class @message, or @sent (common/message_format.py)")


def portable_actor(cls: type) -> type:
    """A class for `ray.remote` that has the calls of `cls`, all of them async, and no reference to a module.

    `cls` itself is imported where the actor runs. It keeps its module and its name: they are in the pickle.
    """
    module, name = cls.__module__, cls.__qualname__

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        from importlib import import_module  # these functions are pickled without this module

        self.actor = getattr(import_module(module), name)(*args, **kwargs)

    def forwarding(call: str) -> Any:
        async def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await getattr(self.actor, call)(*args, **kwargs)

        return forward

    calls = [call for call, _ in inspect.getmembers(cls, inspect.iscoroutinefunction) if not call.startswith("_")]
    return type(name, (), {"__init__": begin, **{call: forwarding(call) for call in calls}})
