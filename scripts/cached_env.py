"""Folders that are built once and kept in `$STEPWELL_CACHE` (default `~/.cache/stepwell`), outside the checkout.

A folder is used again while its stamp says what is wanted; its stamp is written last, so a build that failed is no
build. Progress goes to stderr, which leaves stdout to the script's answer.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

THIS_PYTHON = f"python {sys.version_info.major}.{sys.version_info.minor}"
"""Part of the stamp: an environment works only with the Python that made it."""
STAMP = "stepwell-stamp"


def cached(name: str, wanted: str, build: Callable[[Path], None]) -> Path:
    """The folder of that name. `build` makes it if it is missing or has another stamp."""
    cache = Path(os.environ.get("STEPWELL_CACHE", "~/.cache/stepwell")).expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    home = cache / name
    stamp = home / STAMP
    with locked(home):
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(home, ignore_errors=True)
            build(home)
            stamp.write_text(wanted)
    return home


def extended(home: Path, stamp: str, wanted: str, extend: Callable[[Path], None]) -> None:
    """Adds to a cached folder what is wanted in it; unlike `cached`, it keeps what is there."""
    with locked(home):
        if not (home / stamp).exists() or (home / stamp).read_text() != wanted:
            extend(home)
            (home / stamp).write_text(wanted)


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Two test runs on one machine build it once."""
    with home.with_name(f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def installer(home: Path) -> Callable[..., None]:
    """`pip install` of the environment."""

    def pip(*args: str) -> None:
        run(home / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-input", *args)

    return pip


def new_venv(home: Path) -> Callable[..., None]:
    """An empty environment, and its `pip install`."""
    venv.create(home, with_pip=True)
    return installer(home)


def run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    words = [str(word) for word in command]
    say(" ".join(words[:9]) + (" …" if len(words) > 9 else ""))
    subprocess.run(words, check=True, stdout=sys.stderr, env=env)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
