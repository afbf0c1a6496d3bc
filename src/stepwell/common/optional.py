"""Packages that only training needs, imported when first asked for."""

from importlib import import_module
from types import ModuleType

from stepwell.errors import BadRequest


def needed(package: str, extra: str) -> ModuleType:
    try:
        return import_module(package)
    except ModuleNotFoundError as missing:
        raise BadRequest(f"{package} is not installed: pip install 'stepwell[{extra}]'") from missing
