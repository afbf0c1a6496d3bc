"""Build the environments of other trainers, once each, and print their Pythons.

verl, TRL and SkyRL pin transformers and bring much else, so each has an environment of its own. Stepwell is not
installed in it, but what it imports is: a program that runs there has `src` on its path, and joins the pool's Ray,
which must be the very Ray that runs here. SkyRL's has the tinker client too. stdout has one interpreter's path a line,
in the order of the names; where they are kept, and for how long, says cached_env.py.

    python scripts/trainer_envs.py verl trl skyrl
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
SKYRL = "skyrl==0.4.0"
"""It asks for Python 3.12. Its server can be imported on 3.11, the Python of the pool's Ray, with NEWER_TYPED_DICT."""
NEWER_TYPED_DICT = "import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict\n"
"""Below 3.12, pydantic refuses the TypedDict that SkyRL takes from typing."""
BESIDE_SKYRL = (
    *("tinker==0.25.0", "jax>=0.8,<1.0", "flax>=0.12.6", "optax>=0.2.5", "peft==0.18.1"),
    *(
        "transformers>=5.6.1,<=5.16.1",
        "datasets>=4",
        "pillow>=11.3",
        "rich>=14.1",
        "safetensors>=0.6.2",
        "typer>=0.17.4",
        "cloudpathlib>=0.23",
    ),
    *("zstandard>=0.23", "xxhash>=3", "fastapi[standard]", "sqlmodel", "sqlalchemy[asyncio]", "aiosqlite"),
    *("psutil", "uv"),
)
"""What its Tinker server needs with the JAX backend, on a CPU."""
PACKAGES = {
    "verl": (VERL, *BESIDE_VERL),
    "trl": ("trl==1.16.0", "peft==0.21.2", "requests"),
    "skyrl": (SKYRL, *BESIDE_SKYRL),
}
WITHOUT_DEPENDENCIES = {"skyrl": (SKYRL, "--ignore-requires-python")}
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
        alone = WITHOUT_DEPENDENCIES.get(name, ())
        if alone:
            pip("--no-deps", *alone)
        pip(*(package for package in packages if package not in alone))
        if name == "skyrl":
            (site,) = home.glob("lib/*/site-packages")
            (site / "newer-typed-dict.pth").write_text(NEWER_TYPED_DICT)

    return cached(f"{name}-env", f"{' '.join([*packages, THIS_PYTHON])}\n", build) / "bin" / "python"


def stepwell_needs() -> list[str]:
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    return [f"ray=={version('ray')}", *(line for line in declared if not line.startswith("ray"))]


if __name__ == "__main__":
    main()
