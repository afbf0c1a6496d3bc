"""Which Ray cluster the address "auto" means.

- RAY_ADDRESS, if it is set; else the cluster of `stepwell up` in this folder; else the one that this user's `ray start`
  has written down. Ray itself would also follow a file of any other user, and any process that looks like Ray.
- Nothing is read from files of other users, or from files that others can change.
"""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from stepwell.common.files import read_own, why_folder_is_not_ours
from stepwell.errors import RayUnreachable

AUTO = "auto"
STATE = Path(".stepwell")
ENVIRONMENT = "env"
PREFIX = "RAY_"
NAME_IT = "name the cluster with --ray-address host:port, or RAY_ADDRESS"


def cluster_settings(folder: Path = STATE) -> Mapping[str, str]:
    """The variables by which a process joins the cluster that "auto" means, with RAY_ADDRESS; empty if there is none.

    RayUnreachable if one is written down in a file that is not trusted.
    """
    if given := os.environ.get("RAY_ADDRESS"):
        return {"RAY_ADDRESS": given}
    return _of_state_folder(folder) or _of_ray_start(ray_start_file())


def ray_start_file() -> Path:
    """Where `ray start` writes the address of its cluster."""
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(temporary) / "ray" / "ray_current_cluster"


def _of_state_folder(folder: Path) -> dict[str, str]:
    path = folder / ENVIRONMENT
    try:
        if (why := why_folder_is_not_ours(folder)) is not None:
            raise RayUnreachable(_refusal(folder, why))
        words = shlex.split(read_own(path))
    except FileNotFoundError:
        return {}
    except PermissionError as failure:
        raise RayUnreachable(_refusal(path, failure)) from None
    settings = dict(word.split("=", 1) for word in words if word.startswith(PREFIX) and "=" in word)
    return settings if "RAY_ADDRESS" in settings else {}


def _of_ray_start(path: Path) -> dict[str, str]:
    try:
        address = read_own(path).strip()
    except FileNotFoundError:
        return {}
    except PermissionError as failure:
        raise RayUnreachable(_refusal(path, failure)) from None
    return {"RAY_ADDRESS": address} if address else {}


def _refusal(path: Path, why: object) -> str:
    return f"the Ray cluster that {path} names is not joined: {why}; {NAME_IT}"
