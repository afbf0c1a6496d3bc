"""How every benchmark ends: with one JSON object on the last line, which has its figures and its targets."""

import json
import sys
from collections.abc import Mapping


def report(
    figures: Mapping[str, float],
    at_most: Mapping[str, float] | None = None,
    at_least: Mapping[str, float] | None = None,
) -> None:
    """Print the closing line, and exit with 1 if a target was missed."""
    most, least = at_most or {}, at_least or {}
    missed = [name for name, bound in most.items() if figures[name] > bound]
    missed += [name for name, bound in least.items() if figures[name] < bound]
    targets = {name: f"<= {bound}" for name, bound in most.items()}
    targets |= {name: f">= {bound}" for name, bound in least.items()}
    print(json.dumps({"ok": not missed, "missed": missed, "figures": dict(figures), "targets": targets}))
    sys.exit(1 if missed else 0)
