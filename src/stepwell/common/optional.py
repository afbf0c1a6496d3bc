"""Packages of an optional extra, imported when they are first used, and the command that installs them.

The command names where this Stepwell was installed from: a clone, a wheel, a repository or the package index.
"""

import json
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from stepwell.errors import BadRequest, StepwellError


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
