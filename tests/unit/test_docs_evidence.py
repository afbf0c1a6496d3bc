"""Pages that make promises, or compare Stepwell with others, say what shows each statement, and that exists."""

import re
from pathlib import Path

import pytest

from rig.docs_pages import CHECKOUT, DOCS, files_of_tests, rows
from stepwell.engines import ENGINES
from stepwell.gateway.dialects import DIALECTS
from stepwell.steps.step import STEP_COLUMNS

COMPARISON, CLAW_R1 = DOCS / "comparison.md", DOCS / "coming-from-claw-r1.md"
ATROPOS = DOCS / "coming-from-atropos.md"
GUARANTEES, SCALING = DOCS / "operations" / "guarantees.md", DOCS / "operations" / "scaling.md"
CLAW_R1_TESTS = CHECKOUT / "tests/integration/truth/test_claw_r1_calls.py"
TEST = re.compile(r"def (test_\w+)")


def names_of_tests(*files: Path) -> set[str]:
    return {name for file in files for name in TEST.findall(file.read_text())}


def named_in(page: Path) -> set[str]:
    return set(re.findall(r"`(test_\w+)`", page.read_text()))


@pytest.mark.parametrize("page", [ATROPOS, COMPARISON, CLAW_R1, GUARANTEES, SCALING], ids=lambda page: page.stem)
def test_every_test_and_benchmark_that_a_page_names_exists(page: Path) -> None:
    assert named_in(page) - names_of_tests(*files_of_tests()) == set()
    benchmarks = CHECKOUT / "benchmarks"
    named = set(re.findall(r"\bbenchmarks\.(?!md\b)(\w+)", page.read_text()))
    assert [name for name in named if not any((benchmarks / file).exists() for file in (name, f"{name}.py"))] == []


@pytest.mark.parametrize(
    ("page", "heading"),
    [
        (COMPARISON, "What such systems get wrong, and what happens here"),
        (COMPARISON, "What you get here and rarely elsewhere"),
        (ATROPOS, "The HTTP API"),
        (CLAW_R1, "Calls"),
        (CLAW_R1, "Differences on purpose"),
        (CLAW_R1, "What it did, and what happens now"),
    ],
)
def test_every_row_names_what_shows_it_or_says_that_it_is_not_built(page: Path, heading: str) -> None:
    table = rows(page, heading)
    assert len(table) > 5
    for row in table:
        assert re.search(r"`(test_\w+|benchmarks\.\w+)`", row[-1]) or "not built yet" in " ".join(row), row


def test_the_differences_from_claw_r1_are_those_that_tests_assert() -> None:
    table = rows(CLAW_R1, "Differences on purpose")
    named = [re.findall(r"test_differs_\w+", row[-1]) for row in table]
    assert all(named), "a row without its test"
    asserted = {name for name in names_of_tests(CLAW_R1_TESTS) if name.startswith("test_differs_")}
    assert {name for names in named for name in names} == asserted


def test_the_comparison_admits_what_is_not_there() -> None:
    """When one of these is built, its sentence goes."""
    page = COMPARISON.read_text()
    dialects = {dialect.name for dialect in DIALECTS}
    assert dialects == {"chat", "completions", "messages", "responses"}, "say so under 'Four dialects'"
    assert [kind.name for kind in ENGINES if kind.name == "sglang"] == [], "say so under 'One exact engine'"
    assert [column.name for column in STEP_COLUMNS if "expert" in column.name] == [], "say so under 'No routing replay'"
    for said in ("**Four dialects**", "**One exact engine.**", "**No routing replay.**", "**No unlearning.**"):
        assert said in page
