"""Imports of what is beside the package point one way: tests and benchmarks use rig/, and nothing of each other.

Modules that are named in texts count too: they are started with `-m`, or imported by other processes.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.docs_pages import CHECKOUT

FOLDERS = ("src/stepwell", "rig", "tests", "benchmarks", "benchmarks/tests", "scripts", "examples")
MAY_USE = {
    "src/stepwell": set[str](),
    "rig": set[str](),
    "tests": {"rig"},
    "benchmarks": {"rig"},
    "benchmarks/tests": {"rig", "benchmarks"},
    "scripts": {"rig"},
    "examples": set[str](),
}
"""Each folder, and which others than the package and itself it may use."""
THIS = Path(__file__)
"""Its examples cross borders."""
MODULE = re.compile(r"(?:^|from |import |-m )((?:rig|tests|benchmarks)(?:\.[a-z_]\w*)*)(?=$| import |\n)", re.M)


def folder_of(path: str) -> str | None:
    """The innermost folder that contains a file, or a module by its path."""
    inside = [folder for folder in FOLDERS if path == folder or path.startswith(f"{folder}/")]
    return max(inside, key=len, default=None)


def used(source: str) -> Iterator[str]:
    """The modules that a program imports, in functions too, and those that its texts name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (name for name in MODULE.findall(node.value) if "." in name)


def crossings(folder: str, source: str) -> list[str]:
    """The modules of folders that it may not use."""
    allowed = MAY_USE[folder] | {folder}
    found = {module: folder_of(module.replace(".", "/")) for module in used(source)}
    return [module for module, of in found.items() if of not in {*allowed, None}]


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_is_used_across_a_border(folder: str) -> None:
    files = [file for file in (CHECKOUT / folder).rglob("*.py") if _place(file) == folder and file != THIS]
    assert files
    found = {str(file.relative_to(CHECKOUT)): crossings(folder, file.read_text()) for file in files}
    assert {file: modules for file, modules in found.items() if modules} == {}


def _place(file: Path) -> str | None:
    return folder_of(str(file.relative_to(CHECKOUT)))


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("tests", "from benchmarks.table import BENCHMARKS"),
        ("tests", "def late():\n    from benchmarks import table"),
        ("tests", "import benchmarks.table"),
        ("tests", "line = [sys.executable, '-m', 'benchmarks.survival']"),
        ("tests", "PROGRAM = 'import sys\\nfrom benchmarks.table import BENCHMARKS\\n'"),
        ("benchmarks", "from tests.unit import conftest"),
        ("benchmarks", "from benchmarks.tests import made_up_benchmark"),
        ("rig", "from tests.unit.rewards.texts import answered"),
        ("src/stepwell", "import rig.waiting"),
        ("scripts", "from benchmarks.page import page"),
        ("examples", "from rig.fake_engine import FakeEngine"),
    ],
)
def test_a_crossing_is_found(folder: str, source: str) -> None:
    assert len(crossings(folder, source)) == 1


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("tests", "from rig.builders import make_step"),
        ("tests", '"""All of it is measured by `python -m benchmarks.survival --quick`."""'),
        ("benchmarks/tests", "from benchmarks.table import BENCHMARKS"),
        ("rig", "from stepwell.steps.step import Step"),
    ],
)
def test_what_is_allowed_is_not_found(folder: str, source: str) -> None:
    assert crossings(folder, source) == []
