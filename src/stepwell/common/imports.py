"""Code that is imported by name when it is needed: packages of an optional extra, and functions of users.

- If a package is missing, the error says how to install it from where this Stepwell came: a clone, a wheel, a
  repository or the package index.
- A user's function is named `module:function` or `path/to/file.py:function`. If it cannot be loaded, BadRequest says
  why. Loading runs the code of the function's author.
"""

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from stepwell.errors import BadRequest, StepwellError

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


def require(package: str, extra: str, *, purpose: str = "", error: type[StepwellError] = BadRequest) -> ModuleType:
    """`error` says which extra to install, and what needs it (`purpose`)."""
    try:
        return import_module(package)
    except ModuleNotFoundError as missing:
        what = f"{purpose} needs {missing.name}" if purpose else f"{missing.name} is not installed"
        raise error(f"{what}: {install_command(extra)}") from None


def install_command(extra: str = "") -> str:
    """How to install Stepwell again, with an extra."""
    origin, extras = _origin(), f"[{extra}]" if extra else ""
    url = str(origin.get("url", ""))
    if "dir_info" in origin:
        clone = Path(url2pathname(urlsplit(url).path))
        if not clone.is_dir():
            return f"pip install '.{extras}' in a clone of Stepwell"
        return f"pip install {'-e ' if origin['dir_info'].get('editable') else ''}'{clone}{extras}'"
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"pip install 'stepwell{extras}{f' @ {url}' if url else ''}'"


def _origin() -> dict[str, Any]:
    """The origin of the installation, as pip recorded it by PEP 610; empty if it came from an index."""
    try:
        recorded: dict[str, Any] = json.loads(distribution("stepwell").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return {}
    return recorded
