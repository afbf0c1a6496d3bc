"""Writes docs/reference/ from the code: commands and settings, Python names, the dashboard's calls, metrics.

A test keeps it up to date.

python scripts/reference.py
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import reference_commands
import reference_dashboard
import reference_metrics
import reference_python

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
PAGES: Mapping[str, Callable[[], str]] = {
    "commands.md": reference_commands.page,
    "python.md": reference_python.page,
    "dashboard-api.md": reference_dashboard.page,
    "metrics.md": reference_metrics.page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
        print(f"wrote {FOLDER / name}")
