"""Where Claw-R1's own code is; it is on no package index, and not part of this repository."""

import os
from pathlib import Path

import pytest

VARIABLE = "STEPWELL_CLAW_R1"
"""Names the folder with claw_r1/ and example/."""


def claw_r1() -> Path:
    """That folder. Without it, the test is skipped."""
    folder = Path(os.environ.get(VARIABLE) or "/no/such/folder")
    if not (folder / "claw_r1").is_dir():
        pytest.skip(f"{VARIABLE} names no folder with Claw-R1's claw_r1/: its code is on no package index")
    return folder
