"""Files of the projects that Stepwell takes users from, to run against; they are not part of this repository."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("STEPWELL_ORIGINALS") or Path(__file__).parents[3] / "shared" / "originals")


def original(path: str) -> Path:
    """The file, below a folder with `atropos` and `claw`. Without that folder, the test is skipped."""
    if not (FOLDER / path).is_file():
        pytest.skip(
            f"there is no {path} in {FOLDER}; STEPWELL_ORIGINALS names the folder with Atropos' and Claw-R1's code"
        )
    return FOLDER / path
