"""Whatever is below examples/ is short, explained, listed and run."""

import re
from pathlib import Path

import pytest

from rig.docs_pages import CHECKOUT, blocks
from tests.examples.folders import EXAMPLES, folders, programs

LONGEST = 80
"""Lines of a program."""
TESTS = [path.read_text() for path in (CHECKOUT / "tests").rglob("test_*.py") if path != Path(__file__)]


def test_there_are_examples() -> None:
    assert {folder.name for folder in folders()} >= {"claude_code", "custom_reward", "envs", "openai_agent"}


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)
def test_an_example_has_a_readme_that_says_what_to_type(folder: Path) -> None:
    typed = "".join(block.code for block in blocks(folder / "README.md", "bash"))
    assert f"examples/{folder.name}" in typed


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)
def test_an_example_is_named_by_a_test(folder: Path) -> None:
    assert any(f'"{folder.name}"' in source for source in TESTS)


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)
def test_an_example_is_in_the_list(folder: Path) -> None:
    assert re.search(rf"^\| \[?`{folder.name}`", (EXAMPLES / "README.md").read_text(), re.M)


@pytest.mark.parametrize("folder", [f for f in folders() if f.name != "envs"], ids=lambda folder: folder.name)
def test_the_programs_of_an_example_are_short(folder: Path) -> None:
    lines = {program.name: len(program.read_text().splitlines()) for program in programs(folder)}
    assert lines
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}
