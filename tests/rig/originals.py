"""Files of Atropos, to run against; they are not part of this repository."""

import os
from pathlib import Path

import pytest

VARIABLE = "STEPWELL_ATROPOS"
"""Names the folder with environments/."""


def atropos_file(path: str) -> Path:
    """The file below that folder. Without it, the test is skipped."""
    file = Path(os.environ.get(VARIABLE) or "/no/such/folder") / path
    if not file.is_file():
        pytest.skip(f"{VARIABLE} names no folder of Atropos with {path}")
    return file
