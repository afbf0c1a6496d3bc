"""Packages of an optional extra, imported when they are first used."""

from importlib import import_module
from types import ModuleType

from stepwell.errors import BadRequest


def require(package: str, extra: str) -> ModuleType:
    """BadRequest says which extra to install."""
    try:
        return import_module(package)
    except ModuleNotFoundError as missing:
        raise BadRequest(f"{package} is not installed: pip install 'stepwell[{extra}]'") from missing
