"""Environments of other projects in which benchmarks run those projects' own code."""

import os
from pathlib import Path


def installed_python(name: str) -> Path | None:
    """The interpreter of an environment that a script of ours has built. A benchmark does not build one: that takes
    minutes."""
    cache = Path(os.environ.get("STEPWELL_CACHE", "~/.cache/stepwell")).expanduser()
    home = cache / f"{name}-env"
    return home / "bin" / "python" if (home / "stepwell-stamp").exists() else None
