"""The tools that check what is published, in an environment of their own."""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from release_tools import release_tools


def complaints(tool: str, *words: str | Path) -> str:
    """What the tool says against these files; empty if it finds nothing wrong."""
    command = [str(release_tools() / tool), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}" if done.returncode else ""
