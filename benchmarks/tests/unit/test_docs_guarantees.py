"""The page of guarantees says what shows each of them."""

import re

from benchmarks.survival.rows import ROWS
from rig.docs_pages import DOCS, rows

GUARANTEES = DOCS / "operations" / "guarantees.md"


def test_every_guarantee_names_a_test_or_a_row_of_the_survival_benchmark() -> None:
    survival = {row.name for row in ROWS}
    table = [
        row for heading in re.findall(r"^## (.*)", GUARANTEES.read_text(), re.M) for row in rows(GUARANTEES, heading)
    ]
    assert len(table) > 30
    for row in table:
        named = set(re.findall(r"`([a-z]\w+)`", row[-1]))
        assert named, row
        assert {name for name in named if not name.startswith("test_")} <= survival, row
