"""Build the environments of other frameworks of environments, once each, and print where they are.

verifiers and Harbor each have an environment of their own, because they pin much that Stepwell does without; stdout has
its Python. Harbor needs Python 3.12: if this one is older, another one of the machine is taken. `conformance` and
`nemo_gym` are folders with a package without its requirements: of OpenEnv only the examination of an endpoint is used,
which needs none, and of NeMo Gym, which asks for Python 3.13.14, only its capture of tokens, which runs on Python 3.11.
Where they are kept, and for how long, says cached_env.py.

    python scripts/foreign_envs.py verifiers harbor conformance nemo_gym
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from cached_env import THIS_PYTHON, cached, run, say

PACKAGES = {
    "verifiers": ("verifiers==0.4.0",),
    "harbor": ("harbor==0.25.0",),
    "conformance": ("openenv==0.10.0",),
    "nemo_gym": ("nemo-gym==0.7.0",),
}
WITHOUT_REQUIREMENTS = ("conformance", "nemo_gym")
UV = "uv==0.9.7"
"""Resolves their many requirements in seconds; verifiers' harnesses call it, too."""
NEWEST = "certifi\n"
"""The newest that the registry has, also if Harbor asks for one that a mirror does not have yet. Its tests call nothing
but this machine."""
FOR_HARBOR = ("python3.12", "python3.13", "python3.14")
PYENV = "~/.pyenv/versions"


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the environments of other frameworks.")
    parser.add_argument("names", nargs="+", choices=PACKAGES)
    for name in parser.parse_args().names:
        print(packages(name) if name in WITHOUT_REQUIREMENTS else python_of(name), flush=True)


def packages(name: str) -> Path:
    wanted, alone = PACKAGES[name], ("--no-deps", "--ignore-requires-python", "--no-compile")

    def build(home: Path) -> None:
        say(f"downloading {' '.join(wanted)} to {home} (once; some seconds)")
        run(sys.executable, "-m", "pip", "install", "--quiet", "--no-input", *alone, "--target", home, *wanted)

    return cached(f"{name}-packages", f"{' '.join(wanted)}\n", build)


def python_of(name: str) -> Path:
    made_by = new_python() if name == "harbor" else sys.executable

    def build(home: Path) -> None:
        say(f"building {home} (once; some minutes)")
        run(made_by, "-m", "venv", home)
        python = home / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "--no-input", UV)
        overrides = home / "overrides.txt"
        overrides.write_text(NEWEST)
        packages = ("--override", overrides, *PACKAGES[name])
        run(python, "-m", "uv", "pip", "install", "--quiet", "--python", python, *packages)

    stamp = f"{' '.join(PACKAGES[name])} {THIS_PYTHON if made_by == sys.executable else made_by}\n"
    return cached(f"{name}-env", stamp, build) / "bin" / "python"


def new_python() -> str:
    """A Python of this machine that is 3.12 or newer."""
    if sys.version_info >= (3, 12):
        return sys.executable
    folders = sorted(Path(PYENV).expanduser().glob("3.1[2-9].*/bin/python"))
    for command in (*filter(None, map(shutil.which, FOR_HARBOR)), *map(str, folders)):
        asked = subprocess.run([command, "-c", "import venv"], check=False, capture_output=True)
        if asked.returncode == 0:
            return command
    raise SystemExit("Harbor needs Python 3.12, and this machine has none")


if __name__ == "__main__":
    main()
