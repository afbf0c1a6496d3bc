"""Make the checkout's `.venv` in seconds: packages come from an environment in the cache, Stepwell from this checkout.

- The cache keeps one environment for each set of dependencies, so that runs of two branches do not disturb each other.
  One that was not used for a while is deleted.
- Nothing is installed into it afterwards; what is installed into `.venv` stays there.
- A `.venv` that was made otherwise is kept, and gets what it lacks from pip.

    python scripts/dev_env.py
"""

import hashlib
import json
import os
import shutil
import time
import tomllib
import venv
from pathlib import Path

from cached_env import STAMP, THIS_PYTHON, cached, new_venv, run, say

CHECKOUT = Path(__file__).parents[1]
VENV = CHECKOUT / ".venv"
LINK = "shared-packages.pth"
TORCH = "torch==2.13.0"
LOCKS = ("build", "ci")
"""Of scripts/lock.py. They contain all but torch and what only torch needs."""
RECIPE = 2
"""Raise it when the steps of `build` change, so that environments made by older steps are not used."""
KEPT_DAYS = 14


def main() -> None:
    if VENV.exists() and not list(VENV.glob(f"lib/*/site-packages/{LINK}")):
        for packages in (TORCH,), ("-e", f"{CHECKOUT}[dev]"):
            run(VENV / "bin" / "python", "-m", "pip", "install", "--quiet", *packages)
        return
    wanted = requirements()
    shared = cached(f"dev-env-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}", wanted, build)
    (shared / STAMP).touch()
    delete_unused(shared.parent)
    link(shared)
    pip = (shared / "bin" / "python", "-m", "pip", "--python", VENV / "bin" / "python", "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", CHECKOUT)


def requirements() -> str:
    """All that decides what is installed."""
    declared = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    project = declared["project"]
    names = ("requires-python", "dependencies", "optional-dependencies")
    locks = [hashlib.sha256(path.read_bytes()).hexdigest() for path in lock_files()]
    parts = [TORCH, THIS_PYTHON, RECIPE, declared["build-system"], {name: project[name] for name in names}, locks]
    return json.dumps(parts) + "\n"


def build(home: Path) -> None:
    say(f"building the environment of development in {home} (once; some minutes, about 3 GB)")
    pip = new_venv(home)
    pip(TORCH)
    pip("--no-deps", "--require-hashes", *(word for path in lock_files() for word in ("--requirement", str(path))))


def lock_files() -> list[Path]:
    return [CHECKOUT / "locks" / f"{name}.txt" for name in LOCKS]


def delete_unused(cache: Path) -> None:
    for stamp in cache.glob(f"dev-env-*/{STAMP}"):
        if stamp.stat().st_mtime < time.time() - KEPT_DAYS * 24 * 3600:
            shutil.rmtree(stamp.parent, ignore_errors=True)


def link(shared: Path) -> None:
    """A new `.venv` that sees the packages of `shared`, with its commands."""
    venv.create(VENV, clear=True, symlinks=True)
    (own,) = VENV.glob("lib/*/site-packages")
    (packages,) = shared.glob("lib/*/site-packages")
    (own / LINK).write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    for command in (shared / "bin").iterdir():
        ours = VENV / "bin" / command.name
        if ours.exists():
            continue
        content = command.read_bytes()
        if content.startswith(b"#!"):
            ours.write_bytes(content.replace(os.fsencode(shared), os.fsencode(VENV)))
            ours.chmod(0o755)
        else:
            ours.symlink_to(command)


if __name__ == "__main__":
    main()
