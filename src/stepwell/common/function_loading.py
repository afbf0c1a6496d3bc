"""A user's function, loaded by name: `module:function` or `path/to/file.py:function`.

If it cannot be loaded, BadRequest says why. Loading runs the code of the function's author.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from stepwell.errors import BadRequest

HOW_TO_NAME = "your own is named module:function or path/to/file.py:function"


def describe_failure(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"


def load_member(name: str, describe: Callable[[BaseException], str] = describe_failure) -> tuple[str, object]:
    """The object that the name stands for, and the name without a folder. Files and modules are searched in the current
    folder first. `describe` gives the text of a failed import."""
    place, colon, member = name.rpartition(":")
    if not colon:
        raise BadRequest(f"{name!r} names no function; {HOW_TO_NAME}")
    if place.endswith(".py"):
        path = Path(place).absolute()
        return f"{path.name}:{member}", _member(_import_file(path, describe), place, member)
    return name, _member(_import_module(place, describe), place, member)


def _import_module(name: str, describe: Callable[[BaseException], str]) -> ModuleType:
    _search_first_in(Path())
    try:
        return importlib.import_module(name)
    except BaseException as failure:
        raise BadRequest(f"{name} could not be imported: {describe(failure)}") from failure


def _import_file(path: Path, describe: Callable[[BaseException], str]) -> ModuleType:
    if not path.is_file():
        raise BadRequest(f"there is no file {path}")
    _search_first_in(path.parent)
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as failure:
        raise BadRequest(f"{path} could not be imported: {describe(failure)}") from failure
    return module


def _search_first_in(folder: Path) -> None:
    """A loaded module can then import the files beside it."""
    absolute = str(folder.absolute())
    if absolute not in sys.path:
        sys.path.insert(0, absolute)


def _member(module: ModuleType, place: str, name: str) -> object:
    if not hasattr(module, name):
        public = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise BadRequest(f"{place} has no {name!r}; its functions are: {', '.join(sorted(public)) or 'none'}")
    return getattr(module, name)
