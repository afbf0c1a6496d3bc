"""`python -I start.py PROGRAM LIMITS CHANNEL`: runs a program of this folder without the rest of Stepwell."""

import os
import sys
from importlib import import_module
from types import ModuleType

PACKAGES = ("stepwell", "stepwell.rewards", "stepwell.rewards.candidate")


def main() -> None:
    for name in PACKAGES:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = []
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    program = sys.argv.pop(1)
    import_module(f"{PACKAGES[-1]}.{program}").main()


if __name__ == "__main__":
    main()
