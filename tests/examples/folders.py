"""The folders of examples/, and what their READMEs say to type and to expect."""

import re
from collections import Counter
from pathlib import Path

from rig.docs_pages import CHECKOUT, FENCE, blocks

EXAMPLES = CHECKOUT / "examples"


def folders() -> list[Path]:
    return sorted(path for path in EXAMPLES.iterdir() if path.is_dir() and any(map(Path.is_file, path.iterdir())))


def programs(folder: Path) -> list[Path]:
    """In Python or for a shell."""
    return sorted([*folder.rglob("*.py"), *folder.rglob("*.sh")])


def shell_block(name: str, mark: str) -> str:
    """The one block of shell commands with those words in it, from an example's README."""
    (found,) = [block.code for block in blocks(EXAMPLES / name / "README.md", "bash") if mark in block.code]
    return found


def expected_lines(name: str) -> list[str]:
    """What the README says that one sees: its block without a language."""
    (shown,) = [match["code"] for match in FENCE.finditer(_readme(name)) if not match["language"]]
    return shown.splitlines()


def missing_lines(name: str, printed: str) -> list[str]:
    """Lines of the README that were not printed, each as often as it is missing; their order may be another."""
    return list((Counter(expected_lines(name)) - Counter(line.rstrip() for line in printed.splitlines())).elements())


def addresses_replaced(block: str, ours: dict[str, str]) -> str:
    """A README's commands with the addresses of the test."""
    return re.sub("|".join(map(re.escape, ours)), lambda match: ours[match[0]], block)


def _readme(name: str) -> str:
    return (EXAMPLES / name / "README.md").read_text()
