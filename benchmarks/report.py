"""How every benchmark ends: with one JSON object on the last line, which has its figures and its targets."""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

Bounds = Mapping[str, float]


def parse_no_options(docstring: str | None) -> None:
    """The command line of a benchmark without options: `--help` prints the docstring, and any other word is refused."""
    argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()


def closing(
    figures: Mapping[str, float], at_most: Bounds | None = None, at_least: Bounds | None = None
) -> dict[str, Any]:
    """The closing object."""
    most, least = at_most or {}, at_least or {}
    missed = [name for name, bound in most.items() if figures[name] > bound]
    missed += [name for name, bound in least.items() if figures[name] < bound]
    targets = {name: f"<= {bound}" for name, bound in most.items()}
    targets |= {name: f">= {bound}" for name, bound in least.items()}
    return {"ok": not missed, "missed": missed, "figures": dict(figures), "targets": targets}


def report(figures: Mapping[str, float], at_most: Bounds | None = None, at_least: Bounds | None = None) -> None:
    """Print the closing line, and exit with 1 if a target was missed."""
    told = closing(figures, at_most, at_least)
    print(json.dumps(told))
    sys.exit(0 if told["ok"] else 1)
