"""RemoteObject: an object of the other process. What is done with it is done there, except comparisons.

In the test's process these rules keep the code under test from judging itself:

- An object that is a number, a text or a container by its base class is compared, and calculated with, as plain data.
- Any other object equals no plain value, and is compared only with objects of the same process.
- Arithmetic with a number, text or function gives an object that cannot become a number. A difference to a plain value,
  and any arithmetic with another one, is refused: `abs(f(x) - 3.0).max() < 1e-6` would show the expected 3.0 to code
  that then answers 0.0.
- An object holds a plain value (`3 in f(x)`) if an iteration over it meets that value.
- A context manager of the code suppresses only what a `raise` of the test raised.
"""

import builtins
import operator
from collections.abc import Callable
from numbers import Number
from opcode import opmap
from types import TracebackType
from typing import Any

CALCULATIONS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul"),
    *("lshift", "rshift", "and", "or", "xor"),
)
NUMBERS = ("neg", "pos", "abs", "invert", "int", "float", "complex", "index", "round", "trunc", "floor", "ceil", "bool")
"""What makes a number of an object."""
VIEWS = ("len", "hash", "str", "repr", "bytes", "format", "dir")
PARTS = ("getitem", "setitem", "delitem", "iter", "next", "reversed", "enter", "copy")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
ATTRIBUTES = frozenset(("__name__", "__qualname__", "__doc__", "__dict__", "__module__", "__annotations__"))
"""Names with two underscores that are asked for; others may be protocols of C code, which must not trust the answer."""
PLAIN_RESULTS: dict[str, type | tuple[type, ...]] = {
    "len": int,
    "hash": int,
    "str": str,
    "repr": str,
    "bytes": bytes,
    "format": str,
    "dir": list,
    "int": int,
    "float": float,
    "complex": complex,
    "index": int,
    "bool": bool,
}
LOOKING = frozenset(
    (
        "plain",
        "contains",
        "isinstance",
        "issubclass",
        *COMPARISONS,
        *CALCULATIONS,
        *NUMBERS,
        "len",
        "hash",
        "str",
        "repr",
    )
)
"""Operations in which the code changes nothing that it shares with the test."""
MIXED = "an object of the code met a plain value in a calculation, so the result is not taken as a number"
REFUSED = "an object of the code cannot be calculated with this plain value: compare with ==, or use two of its objects"
TEST = "test"
"""The module of the test's classes, and the file of its program."""
OPAQUE = object()


class RemoteObject:
    __slots__ = ("stepwell_is_mixed", "stepwell_number", "stepwell_peer", "stepwell_plain", "stepwell_type")

    def __init__(self, peer: Any, number: int, base: str) -> None:
        set_here = object.__setattr__
        set_here(self, "stepwell_peer", peer)
        set_here(self, "stepwell_number", number)
        set_here(self, "stepwell_type", getattr(builtins, base) if base else None)
        set_here(self, "stepwell_is_mixed", False)
        set_here(self, "stepwell_plain", None)

    @property
    def __class__(self) -> Any:
        """isinstance(x, int) holds for an IntEnum."""
        return self.stepwell_type or type(self)

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise TypeError("the class of a remote object cannot be changed")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ATTRIBUTES:
            raise AttributeError(name)
        return _ask(self, "getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "delattr", self, name)

    def __exit__(self, kind: Any, failure: Any, trace: Any) -> bool:
        suppresses = bool(_ask(self, "exit", self, None if kind is None else (kind.__name__, str(failure))))
        return suppresses and (trace is None or _is_raised_by_test(failure, trace))

    def __deepcopy__(self, _: Any) -> Any:
        return _ask(self, "deepcopy", self)

    def __contains__(self, item: Any) -> bool:
        return _contains(self, item)

    def __instancecheck__(self, instance: Any) -> bool:
        return bool(_ask(self, "isinstance", instance, self)) if is_remote(instance) else False

    def __subclasscheck__(self, subclass: Any) -> bool:
        return bool(_ask(self, "issubclass", subclass, self)) if is_remote(subclass) else False

    def __mro_entries__(self, bases: Any) -> Any:
        raise TypeError("a test cannot derive a class from one of the code's")


class RemoteCallable(RemoteObject):
    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _ask(self, "call", self, args, tuple(kwargs.items()))


def is_remote(value: Any) -> bool:
    """`isinstance` would ask the value."""
    return issubclass(type(value), RemoteObject)


def make_proxy(peer: Any, number: int, described: dict[str, Any], proxies: dict[int, Any]) -> Any:
    """An exception class gets a class of this process, so that `except` can name it."""
    if "exception" in described:
        return exception_class(proxies, described["exception"], described["classes"])
    base = described.get("base", "")
    if base not in ("", "int", "float", "complex", "str", "bytes", "list", "tuple", "dict", "set", "frozenset"):
        raise TypeError("no base class")
    proxy = (RemoteCallable if described.get("callable") else RemoteObject)(peer, number, base)
    return _coroutine(proxy) if described.get("coroutine") else proxy


def exception_class(proxies: dict[int, Any], base: str, classes: Any) -> type[BaseException]:
    """A class of this process for an exception class of the other one: a built-in base and those derived from it."""
    kind = vars(builtins).get(base)
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        raise TypeError("no exception class")
    for number, name in reversed(classes):
        kind = _mirror_of(proxies, number, name, kind)
    return kind


def _mirror_of(proxies: dict[int, Any], number: int, name: str, base: type[BaseException]) -> type[BaseException]:
    if type(number) is not int or type(name) is not str:
        raise TypeError("no exception class")
    if number not in proxies:
        proxies[number] = type(name, (base,), {"__module__": "candidate"})
    mirror = proxies[number]
    if not isinstance(mirror, type) or not issubclass(mirror, BaseException):
        raise TypeError("no exception class")
    return mirror


async def _coroutine(proxy: RemoteObject) -> Any:
    return _ask(proxy, "run", proxy)


def _ask(proxy: RemoteObject, operation: str, *arguments: Any) -> Any:
    return object.__getattribute__(proxy, "stepwell_peer").request(operation, *arguments)


def plain_view(proxy: Any) -> Any:
    """The object as plain data, or OPAQUE. A number or text is asked for once: it cannot be another one later."""
    if proxy.stepwell_is_mixed:
        return OPAQUE
    if proxy.stepwell_plain is not None:
        return proxy.stepwell_plain[0]
    found = _ask(proxy, "plain", proxy)
    view = OPAQUE if type(found) is not tuple or len(found) != 1 or is_remote(found[0]) else found[0]
    if not isinstance(view, list | dict | set):
        object.__setattr__(proxy, "stepwell_plain", (view,))
    return view


def _contains(proxy: Any, item: Any) -> bool:
    if is_remote(item):
        return bool(_ask(proxy, "contains", proxy, item))
    view = plain_view(proxy)
    if view is not OPAQUE:
        return item in view
    return any(each is item or each == item for each in iter(proxy))


def _is_raised_by_test(failure: BaseException, trace: TracebackType) -> bool:
    """By a `raise` statement: what an assertion or an operation raised can be the code's doing."""
    while trace.tb_next:
        trace = trace.tb_next
    program = trace.tb_frame.f_code
    is_raise = program.co_code[trace.tb_lasti] == opmap["RAISE_VARARGS"]
    return is_raise and program.co_filename == TEST and not isinstance(failure, AssertionError)


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    compare = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        mine = plain_view(self)
        if is_remote(other):
            theirs = plain_view(other)
            if mine is OPAQUE or theirs is OPAQUE:
                return bool(_ask(self, name, self, other))
            return compare(mine, theirs)
        return NotImplemented if mine is OPAQUE else compare(mine, other)

    return method


def _calculation(name: str, *, reflected: bool) -> Callable[..., Any]:
    here: Any = getattr(operator, f"{name}_", None) or getattr(operator, name, None) or getattr(builtins, name)

    def method(self: Any, other: Any, *rest: Any) -> Any:
        operands = (other, self) if reflected else (self, other)
        if is_remote(other):
            result = _ask(self, name, *operands, *rest)
            is_mixed = self.stepwell_is_mixed or other.stepwell_is_mixed
        elif (view := plain_view(self)) is not OPAQUE:
            return here(other, view) if reflected else here(view, other)
        elif name == "sub" or not (other is None or callable(other) or isinstance(other, Number | str | bytes)):
            raise TypeError(REFUSED)
        else:
            result, is_mixed = _ask(self, name, *operands, *rest), True
        return _mixed(result) if is_mixed else result

    return method


def _mixed(result: Any) -> Any:
    if not is_remote(result):
        raise TypeError(MIXED)
    object.__setattr__(result, "stepwell_is_mixed", True)
    return result


def _operation(name: str) -> Callable[..., Any]:
    wanted = PLAIN_RESULTS.get(name)

    def method(self: Any, *arguments: Any) -> Any:
        result = _ask(self, name, self, *arguments)
        if name in NUMBERS and self.stepwell_is_mixed:
            return _mixed(result)
        if wanted is not None and type(result) is not wanted:
            raise TypeError(f"{name}() of the code's object gave a {type(result).__name__}")
        return result

    return method


def _install() -> None:
    for name in COMPARISONS:
        setattr(RemoteObject, f"__{name}__", _comparison(name))
    for name in CALCULATIONS:
        setattr(RemoteObject, f"__{name}__", _calculation(name, reflected=False))
        setattr(RemoteObject, f"__r{name}__", _calculation(name, reflected=True))
    for name in (*NUMBERS, *VIEWS, *PARTS):
        setattr(RemoteObject, f"__{name}__", _operation(name))


_install()
