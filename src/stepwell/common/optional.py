"""Packages of an optional extra, imported when they are first used."""

from importlib import import_module
from types import ModuleType

from stepwell.errors import BadRequest, StepwellError


def require(package: str, extra: str, *, purpose: str = "", error: type[StepwellError] = BadRequest) -> ModuleType:
    """`error` says which extra to install, and what needs it (`purpose`)."""
    try:
        return import_module(package)
    except ModuleNotFoundError as missing:
        what = f"{purpose} needs {missing.name}" if purpose else f"{missing.name} is not installed"
        raise error(f"{what}: pip install 'stepwell[{extra}]'") from None
