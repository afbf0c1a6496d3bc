"""Build the environment of the published atroposlib, once, and print its Python.

It is the measure of the Atropos server: its environments must run against ours unchanged, and its server is measured
beside ours. It wants torch, which Stepwell does without, so it has an environment of its own; where that is kept, and
for how long, says cached_env.py.

    python scripts/atropos_env.py
"""

from pathlib import Path

from cached_env import THIS_PYTHON, cached, new_venv, say

TORCH = "torch==2.13.0"
ATROPOSLIB = "atroposlib==0.4.0"


def main() -> None:
    home = cached("atropos-env", f"{TORCH} {ATROPOSLIB} {THIS_PYTHON}\n", build)
    print(home / "bin" / "python")


def build(home: Path) -> None:
    say(f"building atroposlib's environment in {home} (once; some minutes, about 3 GB)")
    pip = new_venv(home)
    pip(TORCH)
    pip(ATROPOSLIB)


if __name__ == "__main__":
    main()
