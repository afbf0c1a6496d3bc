"""A private folder for the files of a Ray cluster: its sockets, logs and spilled data.

Ray gives its folders mode 0777: every user of the machine could connect to its object store. A parent folder with mode
0700 prevents that.
"""

import os
import tempfile
from pathlib import Path

PREFIX = "sw-"
LONGEST_PARENT = 27
"""Characters: a socket's path has at most 107, and Ray's part of it takes the others."""


def make_ray_folder() -> Path:
    """A new folder with mode 0700, in RAY_TMPDIR or the folder for temporary files if their paths are short enough."""
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent if len(parent) <= LONGEST_PARENT else "/tmp"))
