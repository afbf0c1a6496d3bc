"""Build the environments of the compared gateways, once each, and print their Pythons.

The benchmarks measure other people's gateways as they are published, with the dependencies that they ask for, so each
has an environment of its own. stdout has one interpreter's path a line, in the order of the names; where they are kept,
and for how long, says cached_env.py.

    python scripts/peer_envs.py rllm litellm
"""

import argparse
from pathlib import Path

from cached_env import THIS_PYTHON, cached, new_venv, say

PEERS = {
    "rllm": "rllm-model-gateway==0.1.0",
    "litellm": "litellm[proxy]==1.102.4",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the environments of the gateway's peers.")
    parser.add_argument("names", nargs="+", choices=PEERS)
    for name in parser.parse_args().names:
        print(python_of(name, PEERS[name]), flush=True)


def python_of(name: str, package: str) -> Path:
    def build(home: Path) -> None:
        say(f"building {home} (once)")
        new_venv(home)(package)

    return cached(f"{name}-env", f"{package} {THIS_PYTHON}\n", build) / "bin" / "python"


if __name__ == "__main__":
    main()
