"""How every benchmark ends: one JSON object on the last line, with its targets beside its figures."""

import json
import sys
from collections.abc import Mapping


def report(figures: Mapping[str, float], at_most: Mapping[str, float]) -> None:
    """Print the closing line, and exit with 1 if a target was missed."""
    ok = all(figures[name] <= bound for name, bound in at_most.items())
    targets = {name: f"<= {bound}" for name, bound in at_most.items()}
    print(json.dumps({"ok": ok, "figures": dict(figures), "targets": targets}))
    sys.exit(0 if ok else 1)
