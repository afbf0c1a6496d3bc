"""Build the environment of the published atroposlib, once, and print its Python.

It is the measure of the Atropos server and of stepwell.envs: Atropos' environments must run against ours unchanged, and
its server is measured beside ours. It wants torch, which Stepwell does without, so it has an environment of its own;
where that is kept, and for how long, says cached_env.py.

- `environments/` in it is the folder of that name in atroposlib's source distribution; the wheel does not have it.
- It has what those files import, and what Stepwell's `envs` extra imports, so that it runs Stepwell from a checkout.

    python scripts/atropos_env.py
"""

import json
import shutil
import tarfile
import tempfile
import tomllib
from pathlib import Path

from cached_env import THIS_PYTHON, cached, extended, installer, new_venv, run, say

CHECKOUT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"
ATROPOSLIB = "atroposlib==0.4.0"
ENVIRONMENTS = "environments"
PACKAGES = (
    "transformers<5",  # atroposlib takes what apply_chat_template returns for ids: from 5 on, it is a mapping
    "datasets<5",  # later ones need another huggingface_hub
    "math-verify[antlr4_13_2]",  # with latex2sympy2_extended
    "asteval",
    "beautifulsoup4",
    "gymnasium<1.3",  # the last with Taxi-v3
    "langdetect",
    "lxml",
    "matplotlib",
    "modal",
    "nltk",
    "pandas",
    "pennylane",
    "pillow",
    "python-dotenv",
    "reasoning_gym",
    "regex",
    "requests",
    "safetensors",  # the tests' tiny model
    "scikit-learn",
    "scipy",
    "smolagents",
    "textworld",
    "toml",
    "trimesh",
    "verifiers==0.1.9.post2",  # which atroposlib names
    "web3",
    "websockets",
    "xmltodict",
)
"""What the environments import and a package index has, and no more than that: what is missing is stood in for by
tests/originals."""
NOT_IMPORTED = ("ray",)
"""Dependencies of Stepwell that no process of an environment imports."""


def main() -> None:
    home = cached("atropos-env", f"{TORCH} {ATROPOSLIB} {THIS_PYTHON}\n", build)
    packages = [*PACKAGES, *stepwells_own()]
    extended(home, "packages-stamp", json.dumps(packages), lambda home: installer(home)(*packages))
    extended(home, "environments-stamp", ATROPOSLIB, unpack_environments)
    say(f"Atropos' environments: {home / ENVIRONMENTS}")
    print(home / "bin" / "python")


def stepwells_own() -> list[str]:
    """What `pip install stepwell[envs]` would install beside Stepwell."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["envs"], *extras["arrow"]]
    return [package for package in wanted if not package.startswith((*NOT_IMPORTED, "stepwell"))]


def build(home: Path) -> None:
    say(f"building atroposlib's environment in {home} (once; some minutes, about 3 GB)")
    pip = new_venv(home)
    pip(TORCH)
    pip(ATROPOSLIB)


def unpack_environments(home: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip = (home / "bin" / "python", "-m", "pip", "download", "--quiet", "--no-deps")
        run(*pip, "--no-binary", "atroposlib", "--dest", folder, ATROPOSLIB)
        (source,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
        (unpacked,) = Path(folder).glob(f"*/{ENVIRONMENTS}")
        shutil.copytree(unpacked, home / ENVIRONMENTS, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
