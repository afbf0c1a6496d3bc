"""The page of what Claw-R1's and Atropos' documents promise is written from its data, and each row names its tests."""

import re
import sys
from collections import Counter

import pytest

from rig.docs_pages import CHECKOUT, DOCS, files_of_tests

sys.path.append(str(CHECKOUT / "scripts"))
import seeds

ROWS = [
    (f"{document.letter}{number}", row) for document in seeds.documents() for number, row in enumerate(document.rows, 1)
]
PROMISES = {"G": 32, "M": 25, "P": 10, "B": 27}
"""How many each document has."""
EXACT = 85
"""At least so many are kept under the documented name."""


@pytest.fixture(scope="module")
def tests() -> set[str]:
    return {name for file in files_of_tests() for name in re.findall(r"def (test_\w+)", file.read_text())}


def test_the_page_is_up_to_date() -> None:
    assert (DOCS / "seeds.md").read_text() == seeds.page(), "run scripts/seeds.py"


def test_every_promise_has_its_row() -> None:
    assert Counter(number[0] for number, _ in ROWS) == PROMISES


@pytest.mark.parametrize(("number", "row"), ROWS, ids=[number for number, _ in ROWS])
def test_a_row_names_tests_that_exist_and_the_reason_if_it_is_not_exact(
    number: str, row: seeds.Row, tests: set[str]
) -> None:
    assert row.tests, "a row without a test"
    assert [name for name in row.tests if name not in tests] == []
    assert row.state in seeds.STATES
    assert bool(row.why) == (row.state != "exact")


def test_most_promises_are_kept_exactly_and_none_is_missing() -> None:
    assert Counter(row.state for _, row in ROWS)["exact"] >= EXACT
