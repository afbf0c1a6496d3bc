"""The format of objects that processes of different releases send one another: objects by the name of their class,
values by field name.

- A field that the receiver does not know is left out; one that the sender does not know gets its default. So a field
  may be added at any place if it has a default, and a class may move to another module.
- A field is never renamed, and its meaning never changes. A class keeps its name.
- The sender's FORMAT travels with each object. It is raised if a message of before cannot be read by these rules.

Between a link and its clients messages travel as message_codec.py writes them, elsewhere as pickles.
"""

from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from stepwell import errors
from stepwell.errors import IncompatibleMessage, StepwellError

C = TypeVar("C", bound=type)


class OwnForm(NamedTuple):
    """How a class travels that is sent by other names than those of its fields."""

    values: Callable[[Any], dict[str, Any]]
    read: Callable[[dict[str, Any]], object]
    """ValueError, KeyError or TypeError if they do not fit. Names that it does not know are left out."""


FORMAT = 1
MESSAGES: dict[str, type] = {}
"""The registered classes by name."""
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
