"""What a RemoteObject can be asked for, as functions of Python."""

import builtins
import copy
import math
import operator
from collections.abc import Callable
from typing import Any

from stepwell.rewards.harness.remote import CALCULATIONS, COMPARISONS


def _call(function: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Any:
    return function(*args, **dict(kwargs))


def _run(coroutine: Any) -> Any:
    import asyncio  # slow, and seldom needed

    return asyncio.run(coroutine)


def _enter(manager: Any) -> Any:
    return type(manager).__enter__(manager)


def _exit(manager: Any, failure: tuple[str, str] | None) -> Any:
    if failure is None:
        return type(manager).__exit__(manager, None, None, None)
    kind = getattr(builtins, failure[0], RuntimeError)
    return type(manager).__exit__(manager, kind, kind(failure[1]), None)


def _round(value: Any, *digits: Any) -> Any:
    return round(value, *digits)


def _calculate(name: str) -> Callable[..., Any]:
    found: Any = getattr(operator, f"{name}_", None) or getattr(operator, name, None) or getattr(builtins, name)
    return pow if name == "pow" else found


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in COMPARISONS},
    **{name: _calculate(name) for name in CALCULATIONS},
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "invert": operator.invert,
    "int": int,
    "float": float,
    "complex": complex,
    "index": operator.index,
    "round": _round,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
    "bool": bool,
    "len": len,
    "hash": hash,
    "str": str,
    "repr": repr,
    "bytes": bytes,
    "format": format,
    "dir": dir,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "contains": operator.contains,
    "iter": iter,
    "next": next,
    "reversed": reversed,
    "enter": _enter,
    "exit": _exit,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "call": _call,
    "run": _run,
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
}
