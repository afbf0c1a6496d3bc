"""Build the environment of the package `renderers`, once, and print its Python.

It writes the prompts of some models by hand-written code and continues them, which makes it a second opinion on the
bridge (`python -m benchmarks.bridge_matrix`). Its requirements are not Stepwell's, so it has an environment of its own;
where that is kept, and for how long, says cached_env.py.

    python scripts/renderers_env.py
"""

from pathlib import Path

from cached_env import THIS_PYTHON, cached, new_venv, say

PACKAGES = ("renderers==0.1.12", "httpx==0.28.1", "tokenizers==0.23.3")
"""It imports httpx without requiring it. It takes any tokenizer; ours are read by `tokenizers`."""


def main() -> None:
    home = cached("renderers-env", f"{' '.join([*PACKAGES, THIS_PYTHON])}\n", build)
    print(home / "bin" / "python")


def build(home: Path) -> None:
    say(f"building the environment of renderers in {home} (once; a minute, about 200 MB)")
    new_venv(home)(*PACKAGES)


if __name__ == "__main__":
    main()
