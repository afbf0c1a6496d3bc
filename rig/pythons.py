"""The interpreters of this machine, by version."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def find_python(version: str) -> str:
    """The path of a Python such as 3.12, from PATH or from pyenv's folder."""
    for path in _candidates(version):
        if _version_of(path) == version:
            return path
    raise AssertionError(f"Python {version} is not on PATH and not in pyenv's folder; this test needs it")


def _candidates(version: str) -> Iterator[str]:
    yield sys.executable
    if found := shutil.which(f"python{version}"):
        yield found
    folder = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    yield from map(str, sorted(folder.glob(f"{version}.*/bin/python")))


def _version_of(path: str) -> str:
    """Empty for what does not start, such as pyenv's stand-in for a version that is not selected."""
    program = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    done = subprocess.run([path, "-c", program], capture_output=True, text=True, check=False)
    return done.stdout.strip()
