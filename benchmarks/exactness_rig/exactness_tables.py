"""The exactness matrix as text and as a table of docs/bridge.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "bridge.md"
BEGIN = {
    False: "<!-- begin: python -m benchmarks.exactness --docs -->\n",
    True: "<!-- begin: python -m benchmarks.exactness --vllm --docs -->\n",
}
"""By whether it is the table of real vLLM."""
END = "<!-- end -->\n"
DIALECTS = CHAT, MESSAGES, RESPONSES = "chat", "messages", "responses"
EXACT = "exact"


@dataclass(frozen=True)
class ExactnessCell:
    family: str
    tools: str
    dialect: str
    is_streamed: bool
    outcome: str
    """`exact`, or `refused: ` and why."""
    faults: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        return "WRONG" if self.faults else self.outcome


def figures(cells: Sequence[ExactnessCell]) -> dict[str, float]:
    exact = sum(cell.shown == EXACT for cell in cells)
    wrong = sum(bool(cell.faults) for cell in cells)
    return {
        "families": len({cell.family for cell in cells}),
        "cells": len(cells),
        "exact": exact,
        "refused": len(cells) - exact - wrong,
        "wrong": wrong,
    }


def lines(cells: Sequence[ExactnessCell]) -> list[str]:
    """One of each family and kind of tools. What is the same in all dialects, streamed and not, is told once."""
    return [f"{family:30} {tools:15} {shown}" for family, tools, shown in _rows(cells)]


def fault_lines(cells: Sequence[ExactnessCell]) -> list[str]:
    wrong = [(cell, "streamed" if cell.is_streamed else "whole", fault) for cell in cells for fault in cell.faults]
    return [f"WRONG: {cell.family}, {cell.tools}, {cell.dialect}, {how}: {fault}" for cell, how, fault in wrong]


def table(cells: Sequence[ExactnessCell]) -> str:
    counted = figures(cells)
    summary = (
        f"{counted['families']:.0f} families, {counted['cells']:.0f} conversations: {counted['exact']:.0f} are exact,"
        f" {counted['refused']:.0f} refused, {counted['wrong']:.0f} wrong.\n"
    )
    columns = list(dict.fromkeys(cell.tools for cell in cells))
    heads = ["| family | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    by_family: dict[str, list[str]] = {}
    for family, _, shown in _rows(cells):
        by_family.setdefault(family, []).append(_marked(shown))
    rows = [f"| {family} | " + " | ".join(shown) + " |" for family, shown in by_family.items()]
    return "\n".join([summary, *heads, *rows, ""])


def _rows(cells: Sequence[ExactnessCell]) -> list[tuple[str, str, str]]:
    found: dict[tuple[str, str], list[ExactnessCell]] = {}
    for cell in cells:
        found.setdefault((cell.family, cell.tools), []).append(cell)
    return [(*key, _together(row)) for key, row in found.items()]


def _together(cells: Sequence[ExactnessCell]) -> str:
    if len({cell.shown for cell in cells}) == 1:
        return cells[0].shown
    return "; ".join(f"{cell.dialect}{', streamed' if cell.is_streamed else ''}: {cell.shown}" for cell in cells)


def _marked(shown: str) -> str:
    kind, colon, reasons = shown.partition(": ")
    return kind + colon + ", ".join(f"`{reason}`" for reason in reasons.split(", ")) if colon else kind


def write_docs(cells: Sequence[ExactnessCell], *, on_vllm: bool) -> None:
    """Replace what stands between the marks."""
    text = PAGE.read_text()
    before, begin, rest = text.partition(BEGIN[on_vllm])
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} has no place for the table")
    PAGE.write_text(before + begin + table(cells) + end + after)
