"""Docstrings stand alone: in a tooltip or in a reference, the name above them is missing."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "stepwell"
PARTLY_CHECKED = ("pool/", "demo/", "gateway/app.py")
"""Parts of the package where only the words of NOWHERE are checked yet."""

NOWHERE = "Of|As|Those"
"""Words of NEVER that begin no docstring at all, in any part of the package."""
NEVER = f"{NOWHERE}|Also|What|That|Its|It|They|Their|Both|To|On|Among|Besides?|Since|Once|So that"
"""Words that stand in place of a subject: of what, whose, which ones?"""
NEEDS_A_CLAUSE = "At|By|In|For|From|With|Without|Until|Before|After|Between"
"""Words that may begin a sentence whose subject follows a comma or a colon."""
BANNED = re.compile(rf"({NOWHERE})\b")
HEADLESS = re.compile(rf"({NEVER})\b|({NEEDS_A_CLAUSE})\b(?! (most|least))[^,:]*([.?!](\s|$)|$)")


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The texts that stand alone in a module: docstrings of modules, classes and functions, and those below fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def test_no_docstring_is_headless() -> None:
    found: list[str] = []
    for module in sorted(ROOT.rglob("*.py")):
        place = module.relative_to(ROOT).as_posix()
        pattern = BANNED if place.startswith(PARTLY_CHECKED) else HEADLESS
        texts = docstrings(ast.parse(module.read_text()))
        found += [f"{place}:{line}: {text:.60}" for line, text in texts if pattern.match(text)]
    assert found == []


def test_a_headless_text_is_told_from_a_sentence() -> None:
    headless = ("Of one caller, now.", "Those of its rate.", "What is due.", "Until it ends.", "For all.", "Its name.")
    assert [text for text in headless if not HEADLESS.match(text)] == []
    assert [text for text in ("Of one.", "As soon as it ends.", "Those of it.") if not BANNED.match(text)] == []
    whole = (
        "The calls of one caller.",
        "Without a key, all may call.",
        "At most ten calls.",
        "Official.",
        "Item by item.",
    )
    assert [text for text in whole if HEADLESS.match(text) or BANNED.match(text)] == []
