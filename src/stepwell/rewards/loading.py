"""Reward functions, found by name.

A name is `module:function`, `path/to/file.py:function`, or that of a built-in. What always holds: a function that
cannot be had is a BadRequest whose text says why; loading runs the code of whoever wrote it.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from pydantic import ValidationError

from stepwell.errors import BadRequest
from stepwell.pool.api.scoring import Score
from stepwell.rewards.blame import blame
from stepwell.rewards.sample import Sample
from stepwell.steps.step import JsonObject

Call: TypeAlias = Callable[[Sample], float | Score | Awaitable[float | Score]]

HOW_TO_NAME = "your own is named module:function or path/to/file.py:function"


@dataclass(frozen=True, slots=True)
class RewardFunction:
    name: str
    """The source of the rewards it gives."""
    call: Call
    is_async: bool


def load(name: str, options: JsonObject | None = None) -> RewardFunction:
    """The function of that name; files and modules are looked for in the current folder first.

    Options are for built-ins.
    """
    place, colon, function = name.rpartition(":")
    if not colon:
        return _as_function(name, _built_in(name, options or {}))
    if options:
        raise BadRequest(f"options are for built-in functions; {name} takes none")
    if place.endswith(".py"):
        path = Path(place).absolute()
        return _as_function(f"{path.name}:{function}", _member(_module_of_file(path), place, function))
    return _as_function(name, _member(_module(place), place, function))


def _as_function(name: str, call: object) -> RewardFunction:
    if not callable(call):
        raise BadRequest(f"{name} is no function but a {type(call).__name__}")
    is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004
    return RewardFunction(name, call, is_async)


def _built_in(name: str, options: JsonObject) -> object:
    from stepwell.rewards.builtin.table import BUILT_IN

    if name not in BUILT_IN:
        raise BadRequest(f"no built-in reward function is called {name!r}; {HOW_TO_NAME}; there are {_list(BUILT_IN)}")
    try:
        return BUILT_IN[name](**options)
    except ValidationError as wrong:
        words = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in wrong.errors())
        raise BadRequest(f"{name} cannot be made with these options: {words}") from wrong
    except (TypeError, ValueError, ImportError) as failure:
        raise BadRequest(f"{name} cannot be made with these options: {failure}") from failure


def _module(name: str) -> ModuleType:
    _look_first_in(Path())
    try:
        return importlib.import_module(name)
    except BaseException as failure:
        raise BadRequest(f"{name} could not be imported: {blame(failure)}") from failure


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise BadRequest(f"there is no file {path}")
    _look_first_in(path.parent)
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as failure:
        raise BadRequest(f"{path} could not be imported: {blame(failure)}") from failure
    return module


def _look_first_in(folder: Path) -> None:
    """So that what is loaded finds the files beside it."""
    absolute = str(folder.absolute())
    if absolute not in sys.path:
        sys.path.insert(0, absolute)


def _member(module: ModuleType, place: str, name: str) -> object:
    if not hasattr(module, name):
        mine = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise BadRequest(f"{place} has no {name!r}; its functions are: {_list(mine) or 'none'}")
    return getattr(module, name)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
