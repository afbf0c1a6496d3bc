"""The matrix of templates and cases as tables of docs/bridge.md."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bridge_rig.second_opinion import BridgedCall

PAGE = Path(__file__).resolve().parents[2] / "docs" / "bridge.md"
BEGIN, END = "<!-- begin: python -m benchmarks.bridge_matrix --docs -->\n", "<!-- end -->\n"
TEXT = "text"
BRIDGED, NOT_RENDERED, WRONG = "bridged", "not rendered", "wrong"


@dataclass(frozen=True)
class Cell:
    template: str
    family: str
    case: str
    tokens: str
    outcome: str
    """One of the above, or the reason for which a call was not bridged."""
    faults: tuple[str, ...] = ()
    bridged: tuple[BridgedCall, ...] = field(default=(), repr=False, compare=False)


def count(outcomes: Iterable[str]) -> dict[str, int]:
    """By outcome, the most frequent first."""
    return dict(Counter(outcomes).most_common())


def write_docs(cells: Sequence[Cell]) -> None:
    """Replace what stands between the marks."""
    text = PAGE.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} has no place for the tables")
    PAGE.write_text(before + begin + tables(cells) + end + after)


def tables(cells: Sequence[Cell]) -> str:
    total = count(cell.outcome for cell in cells)
    templates, cases = (len({getattr(cell, name) for cell in cells}) for name in ("template", "case"))
    bridged, wrong, not_rendered = (total.get(outcome, 0) for outcome in (BRIDGED, WRONG, NOT_RENDERED))
    tokenizers = len({cell.tokens for cell in cells} - {TEXT})
    summary = (
        f"{templates} templates, {cases} cases, at the level of text and with {tokenizers} tokenizers:"
        f" {len(cells):,} conversations. {bridged:,} are bridged,"
        f" {len(cells) - bridged - wrong - not_rendered:,} refused, {not_rendered:,} not rendered by their template,"
        f" {wrong} wrong.\n"
    )
    texts = [cell for cell in cells if cell.tokens == TEXT]
    return "\n".join([summary, _by_case(texts), _by_family(texts)])


def _by_case(cells: Sequence[Cell]) -> str:
    lines = ["| case | bridged | refused | not rendered | reasons |", "|---|---|---|---|---|"]
    for case in dict.fromkeys(cell.case for cell in cells):
        counted = count(cell.outcome for cell in cells if cell.case == case)
        bridged, not_rendered = counted.pop(BRIDGED, 0), counted.pop(NOT_RENDERED, 0)
        reasons = ", ".join(f"`{reason}` {number}" for reason, number in counted.items())
        lines.append(f"| {case} | {bridged} | {sum(counted.values())} | {not_rendered} | {reasons} |")
    return "\n".join([*lines, ""])


def _by_family(cells: Sequence[Cell]) -> str:
    """Of the cases in which anything is bridged: bridged of rendered."""
    families = sorted({cell.family for cell in cells})
    sizes = {family: len({cell.template for cell in cells if cell.family == family}) for family in families}
    heads = [f"{family} ({sizes[family]})" for family in families]
    lines = ["| bridged of rendered | " + " | ".join(heads) + " |", "|---" * (len(families) + 1) + "|"]
    for case in dict.fromkeys(cell.case for cell in cells if cell.outcome == BRIDGED):
        row = [_share([cell for cell in cells if cell.case == case and cell.family == family]) for family in families]
        lines.append(f"| {case} | " + " | ".join(row) + " |")
    return "\n".join([*lines, ""])


def _share(cells: Sequence[Cell]) -> str:
    rendered = [cell for cell in cells if cell.outcome != NOT_RENDERED]
    return f"{sum(cell.outcome == BRIDGED for cell in rendered)}/{len(rendered)}" if rendered else "–"
