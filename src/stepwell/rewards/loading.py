"""Reward functions, loaded by name: `module:function`, `path/to/file.py:function`, or the name of a built-in.

If a function cannot be loaded, BadRequest says why. Loading runs the code of the function's author.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import ModuleType

from pydantic import ValidationError

from stepwell.common.async_calls import is_async
from stepwell.errors import BadRequest, NotReady
from stepwell.rewards.attempt import failure_text
from stepwell.rewards.confinement.sandbox import SandboxLevel
from stepwell.rewards.function import RewardFunction
from stepwell.steps.step import JsonObject

HOW_TO_NAME = "your own is named module:function or path/to/file.py:function"


def load(
    name: str, options: JsonObject | None = None, *, sandbox: SandboxLevel = SandboxLevel.STRICT
) -> RewardFunction:
    """The function of that name. Files and modules are searched in the current folder first; only built-ins have
    options. `sandbox` is where a built-in function runs generated code."""
    place, colon, member = name.rpartition(":")
    if not colon:
        return _as_function(name, _built_in(name, options or {}, sandbox))
    if options:
        raise BadRequest(f"options are for built-in functions; {name} takes none")
    if place.endswith(".py"):
        path = Path(place).absolute()
        return _as_function(f"{path.name}:{member}", _member(_import_file(path), place, member))
    return _as_function(name, _member(_import_module(place), place, member))


def _as_function(name: str, call: object) -> RewardFunction:
    if not callable(call):
        raise BadRequest(f"{name} is no function but a {type(call).__name__}")
    return RewardFunction(name, call, is_async(call), bool(getattr(call, "by_step", False)))


def _built_in(name: str, options: JsonObject, sandbox: SandboxLevel) -> object:
    from stepwell.rewards.builtin.table import BUILT_IN, make_built_in  # slow; a child needs it only for a built-in

    if name not in BUILT_IN:
        raise BadRequest(f"no built-in reward function is called {name!r}; {HOW_TO_NAME}; there are {_list(BUILT_IN)}")
    try:
        return make_built_in(name, options, partial(load, sandbox=sandbox), sandbox)
    except ValidationError as invalid:
        text = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in invalid.errors())
        raise BadRequest(f"{name} cannot be made with these options: {text}") from invalid
    except NotReady as why:
        raise BadRequest(f"{name} cannot run here: {why}") from why
    except (TypeError, ValueError, ImportError) as failure:
        raise BadRequest(f"{name} cannot be made with these options: {failure}") from failure


def _import_module(name: str) -> ModuleType:
    _search_first_in(Path())
    try:
        return importlib.import_module(name)
    except BaseException as failure:
        raise BadRequest(f"{name} could not be imported: {failure_text(failure)}") from failure


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise BadRequest(f"there is no file {path}")
    _search_first_in(path.parent)
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as failure:
        raise BadRequest(f"{path} could not be imported: {failure_text(failure)}") from failure
    return module


def _search_first_in(folder: Path) -> None:
    """A loaded module can then import the files beside it."""
    absolute = str(folder.absolute())
    if absolute not in sys.path:
        sys.path.insert(0, absolute)


def _member(module: ModuleType, place: str, name: str) -> object:
    if not hasattr(module, name):
        public = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise BadRequest(f"{place} has no {name!r}; its functions are: {_list(public) or 'none'}")
    return getattr(module, name)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
