"""What processes of different releases send one another: objects by the name of their class, values by field name.

- A field that the receiver does not know is left out; one that the sender does not know gets its default. So a field
  may be added at any place if it has a default, and a class may move to another module.
- A field is never renamed, and its meaning never changes. A class keeps its name.
- The sender's FORMAT travels with each object. It is raised if a message of before cannot be read by these rules.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from stepwell.errors import IncompatibleMessage

C = TypeVar("C", bound=type)

FORMAT = 1
MESSAGES: dict[str, type] = {}
"""By the name of the class."""


def message(cls: C) -> C:
    """Class decorator: a dataclass or named tuple that processes send one another."""
    assert cls.__name__ not in MESSAGES, cls
    MESSAGES[cls.__name__] = cls
    names = _field_names(cls)

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
    known = {field: values[field] for field in _field_names(cls) if field in values}
    if lacking := sorted(_required(cls) - known.keys()):
        raise IncompatibleMessage(
            f"{name} came without {', '.join(lacking)}: its sender is of an older release than this process can read"
        )
    return cls(**known)


def incompatible(name: str, sent_format: int) -> IncompatibleMessage:
    return IncompatibleMessage(
        f"this Stepwell cannot read {name} of another one (message format {sent_format}, here {FORMAT}): "
        "bring the processes of the pool to the same release"
    )


@cache
def _field_names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in _init_fields(cls)) if is_dataclass(cls) else cls._fields  # type: ignore[attr-defined]


@cache
def _required(cls: Any) -> set[str]:
    if not is_dataclass(cls):
        return set(cls._fields) - set(cls._field_defaults)
    return {f.name for f in _init_fields(cls) if f.default is MISSING and f.default_factory is MISSING}


def _init_fields(cls: Any) -> list["Field[Any]"]:
    return [field for field in fields(cls) if field.init]
