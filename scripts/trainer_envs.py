"""Build the environments of other trainers, once each, and print their Pythons.

verl and TRL pin transformers and bring much else, so each has an environment of its own. Stepwell is not installed in
it, but what it imports is: a program that runs there has `src` on its path, and joins the pool's Ray, which must be
the very Ray that runs here. stdout has one interpreter's path a line, in the order of the names; where they are kept,
and for how long, says cached_env.py.

    python scripts/trainer_envs.py verl trl
"""

import argparse
import tomllib
from importlib.metadata import version
from pathlib import Path

from cached_env import THIS_PYTHON, cached, new_venv, say

TORCH = "torch==2.13.0"
VERL = "verl==0.9.1"
BESIDE_VERL = ("TransferQueue==0.1.11", "tensordict==0.10.0", "transformers>=5.5.3,<5.11,!=5.6.0", "cachetools")
"""What its V1 trainer imports and its package does not ask for, and versions that work together."""
PACKAGES = {"verl": (VERL, *BESIDE_VERL), "trl": ("trl==1.16.0", "peft==0.21.2", "requests")}
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the environments of the trainers that Stepwell plugs into.")
    parser.add_argument("names", nargs="+", choices=PACKAGES)
    for name in parser.parse_args().names:
        print(python_of(name), flush=True)


def python_of(name: str) -> Path:
    packages = [TORCH, *PACKAGES[name], *stepwell_needs()]

    def build(home: Path) -> None:
        say(f"building {home} (once; some minutes, about 2 GB)")
        pip = new_venv(home)
        pip(TORCH)
        pip(*packages)

    return cached(f"{name}-env", f"{' '.join([*packages, THIS_PYTHON])}\n", build) / "bin" / "python"


def stepwell_needs() -> list[str]:
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    return [f"ray=={version('ray')}", *(line for line in declared if not line.startswith("ray"))]


if __name__ == "__main__":
    main()
