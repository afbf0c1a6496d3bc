"""Build the environment of the tools that build and check releases, once, and print its folder of commands.

They build sdist and wheel, and check them, the workflows of the forge, CITATION.cff and the Dockerfile. Where it is
kept, and for how long, says cached_env.py.

    python scripts/release_tools.py
"""

import hashlib
from pathlib import Path

from cached_env import THIS_PYTHON, cached, new_venv, say

LOCKS = tuple(Path(__file__).parents[1] / "locks" / f"{name}.txt" for name in ("build", "release"))
"""Of scripts/lock.py."""


def main() -> None:
    print(release_tools())


def release_tools() -> Path:
    hashes = " ".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in LOCKS)
    return cached("release-tools", f"{hashes} {THIS_PYTHON}\n", build) / "bin"


def build(home: Path) -> None:
    say(f"building the environment of the tools for releases in {home} (once; about 200 MB)")
    new_venv(home)("--no-deps", "--require-hashes", *(word for path in LOCKS for word in ("-r", str(path))))


if __name__ == "__main__":
    main()
