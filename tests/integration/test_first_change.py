"""docs/first-change.md, walked in a clone of this checkout: its files are written, its edits made, its commands run.

The clone has this environment in place of one that is installed, which the page's `pip install` would take minutes for.
`just check test` runs narrowed to what the change touches; at night it runs as it is written.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from rig.docs_pages import CHECKOUT, DOCS, FENCE
from rig.shells import Shell, fresh_shell

PAGE = DOCS / "first-change.md"
MOST_WORDS = 600
FILE = re.compile(r"^`([\w./-]+)`:$", re.M)
INSTALLING = ("python3 -m venv", ".venv/bin/pip install", "export PATH")
CHECKS = "just check test"
TOUCHED = (
    *("tests/unit/rewards/builtin", "tests/unit/test_borders.py", "tests/unit/test_docs_links.py"),
    *("tests/unit/test_docs_snippets.py", "tests/unit/test_docstrings.py", "tests/unit/test_names.py"),
)
"""The unit tests that the change could break."""
TIMEOUT, NIGHTLY_TIMEOUT = 500.0, 7_200.0


@dataclass(frozen=True)
class Written:
    """What the page does to a file: `py` is all of a new one, `diff` an edit."""

    path: str
    language: str
    code: str

    def apply(self, clone: Path) -> None:
        file = clone / self.path
        if self.language == "py":
            assert not file.exists(), f"{self.path} is there already"
            file.write_text(self.code)
        else:
            file.write_text(edited(file.read_text(), self.code))


@dataclass(frozen=True)
class Typed:
    """A line of a `bash` block."""

    line: str
    fails: bool


def edited(text: str, diff: str) -> str:
    """The text with the diff's lines in place of those that it has; they must be there once."""
    lines = [line or " " for line in diff.splitlines()]
    old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +"))
    assert f"\n{text}".count(f"\n{old}") == 1, f"the file has these lines not once:\n{old}"
    return f"\n{text}".replace(f"\n{old}", f"\n{new}").removeprefix("\n")


def steps() -> Iterator[Written | Typed]:
    text, path, before = PAGE.read_text(), "", 0
    for block in FENCE.finditer(text):
        prose = text[before : block.start()]
        path = [path, *FILE.findall(prose)][-1]
        if block["language"] == "bash":
            yield from (Typed(line, "It fails" in prose) for line in block["code"].splitlines())
        else:
            yield Written(path, block["language"], block["code"])
        before = block.end()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A newcomer's, in an empty folder; `$REPOSITORY` has what this checkout has, committed or not."""
    repository = tmp_path / "repository"
    files = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, files.stdout.split("\0")):
        if (CHECKOUT / name).is_file():
            (repository / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, repository / name)
    person = {f"GIT_{role}_{what}": "newcomer" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    clone = tmp_path / "work" / "stepwell"
    clone.parent.mkdir()
    found = {"PATH": f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(clone / "src")}
    with fresh_shell(clone.parent, REPOSITORY=str(repository), **person, **found) as shell:
        for line in ("git init -q -b main", "git add --all --force", "git commit -q -m Everything"):
            Shell(repository, shell.env).run(*line.split())
        yield shell


def install(clone: Path) -> None:
    """This environment, and what mypy found out about packages."""
    (clone / ".venv").symlink_to(sys.prefix)
    cache = Path(os.environ.get("STEPWELL_CACHE", "~/.cache/stepwell")).expanduser() / "mypy"
    with suppress(OSError, shutil.Error):  # there is none, or another run has just replaced it
        shutil.copytree(cache, clone / ".mypy_cache")


def narrowed(shell: Shell, changed: list[str]) -> list[str]:
    """The commands of `just check test`: mypy of the changed files, and of the tests those that the change touches."""
    commands = shell.run(*CHECKS.replace("just", "just --dry-run").split()).splitlines()
    assert [Path(command.split()[0]).name for command in commands] == ["ruff", "ruff", "mypy", "lint-imports", "python"]
    commands[2] += " " + " ".join(dict.fromkeys(name for name in changed if name.endswith(".py")))
    everything, tests = "tests/unit benchmarks/tests/unit", " ".join(TOUCHED)
    assert everything in commands[4]
    commands[4] = commands[4].replace(everything, tests)
    return commands


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["narrowed", "whole"])
def test_a_newcomer_comes_from_the_clone_to_green_checks(shell: Shell, whole: bool) -> None:
    timeout = NIGHTLY_TIMEOUT if whole else TIMEOUT
    changed: list[str] = []
    checked = False
    for step in steps():
        if isinstance(step, Written):
            step.apply(shell.folder)
            changed.append(step.path)
        elif step.line.startswith("cd "):
            shell = Shell(shell.folder / step.line.removeprefix("cd "), shell.env)
            install(shell.folder)
        elif step.line == CHECKS:
            lines = [CHECKS] if whole else narrowed(shell, changed)
            for line in lines:
                shell.run("bash", "-ec", line, timeout=timeout)
            checked = True
        elif not step.line.startswith(INSTALLING):
            shell.run("bash", "-ec", step.line, timeout=timeout, status=1 if step.fails else 0)
    assert checked
    committed = shell.run("git", "show", "--name-only", "--format=").split()
    assert set(committed) == set(changed)


def test_the_page_is_short_and_is_the_first_that_contributors_are_sent_to() -> None:
    assert len(PAGE.read_text().split()) <= MOST_WORDS
    assert CHECKS in (contributing := (CHECKOUT / "CONTRIBUTING.md").read_text())
    assert f"docs/{PAGE.name}" in contributing
