"""The findings of the doctor, and the printed report. Each check and each cell of the table of cases is a finding.

- A warning or a fault says what is wrong and what to do.
- A fact that could not be found out is never graded as fine.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from stepwell.steps.step import Json

if TYPE_CHECKING:
    from rich.text import Text

CANNOT_TELL = (
    "faults that appear only under load, with long prompts, or during a weight update: the calls were few, short, and "
    "one at a time",
    "whether the weights are the ones you expect: a weight sync checks that with its probe",
    "whether tokens are sampled correctly: only their log-probabilities are checked",
)
"""The faults that calls from outside cannot show."""
WIDTH = 9
"""Characters of a cell."""


class Grade(StrEnum):
    EXACT = "exact"
    """Proved, token for token."""
    OK = "ok"
    WARNING = "warning"
    """The examined part works, but with a disadvantage."""
    FAULT = "fault"
    UNKNOWN = "–"
    """The question does not apply, or could not be answered."""


@dataclass(frozen=True, slots=True)
class Finding:
    grade: Grade
    what: str = ""
    """The observation; in a cell of the table, why it is not exact."""
    remedy: str = ""
    """The remedy, as an instruction."""


EXACT = Finding(Grade.EXACT)


NOTHING = Finding(Grade.UNKNOWN)


class CaseColumn(StrEnum):
    """A property that is checked in each case."""

    IDS = "ids"
    """The engine returned token ids, as many as it counts in usage."""
    LOGPROBS = "logprobs"
    """One log-probability per id; each is finite and at most 0."""
    TEXT = "text"
    """The ids decode to the text that the agent got."""
    STREAM = "stream"
    """A streamed answer is equal to the whole answer."""
    PREFIX = "prefix"
    """The next turn's prompt starts with this turn's prompt and response."""
    RESCORED = "rescored"
    """The engine computes the same log-probabilities for these tokens again."""


CaseCells: TypeAlias = Mapping[CaseColumn, Finding]
"""The findings of one case; a missing column does not apply to it."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    finding: Finding


@dataclass(frozen=True, slots=True)
class CaseRow:
    case: str
    cells: CaseCells

    def cell(self, column: CaseColumn) -> Finding:
        return self.cells.get(column, NOTHING)


@dataclass(frozen=True, slots=True)
class Report:
    engine: str
    checks: tuple[Check, ...]
    rows: tuple[CaseRow, ...] = ()
    """Empty if the engine could not be called."""
    missing: tuple[str, ...] = ()
    """The capabilities that the engine lacks, with their cost and what to do, as `stepwell up` says it."""

    def with_checks(self, more: Iterable[Check]) -> "Report":
        return replace(self, checks=(*self.checks, *more))

    @property
    def is_exact(self) -> bool:
        """Whether there is no fault, and ids and log-probabilities are proved in every case."""
        proved = {row.cell(column).grade for row in self.rows for column in (CaseColumn.IDS, CaseColumn.LOGPROBS)}
        return proved == {Grade.EXACT} and not any(self.faults())

    def faults(self) -> Iterator[Finding]:
        cells = (finding for row in self.rows for finding in row.cells.values())
        findings = (*(check.finding for check in self.checks), *cells)
        return (finding for finding in findings if finding.grade is Grade.FAULT)


COLOURS: Mapping[Grade, str] = {
    Grade.EXACT: "green",
    Grade.OK: "green",
    Grade.WARNING: "yellow",
    Grade.FAULT: "bold red",
}


def plain(report: Report) -> str:
    return "\n".join(
        (
            f"engine {report.engine}\n",
            *_checks(report),
            *_table(report),
            *_reasons(report),
            *(("\nMissing:", *(f"  {line}" for line in report.missing)) if report.missing else ()),
            "\nNot checked, because it cannot be seen from outside:",
            *(f"  {line}" for line in CANNOT_TELL),
            f"\n{verdict(report)}\n",
        )
    )


def coloured(report: Report) -> "Text":
    from rich.text import Text

    text = Text(plain(report))
    for grade, colour in COLOURS.items():
        text.highlight_regex(rf"(?m)(?<![\w,]){grade}(?=\s\s|\s*$)", colour)
    return text


def as_json(report: Report) -> dict[str, Json]:
    return {
        "engine": report.engine,
        "exact": report.is_exact,
        "checks": [{"name": check.name, **_finding(check.finding)} for check in report.checks],
        "cases": [
            {"case": row.case, "cells": {str(column): _finding(row.cell(column)) for column in CaseColumn}}
            for row in report.rows
        ],
        "missing": list(report.missing),
        "cannot_tell": list(CANNOT_TELL),
    }


def verdict(report: Report) -> str:
    if report.is_exact:
        return "Exact: what a gateway records of this engine is what it sampled."
    faults = sum(1 for _ in report.faults())
    return f"NOT exact: {faults} {'fault' if faults == 1 else 'faults'}." if faults else "NOT proved exact."


def _finding(finding: Finding) -> dict[str, Json]:
    """The JSON key of the grade is "mark", and an unknown one is "untold"."""
    grade = "untold" if finding.grade is Grade.UNKNOWN else str(finding.grade)
    return {"mark": grade, "what": finding.what, "remedy": finding.remedy}


def _checks(report: Report) -> list[str]:
    wide = max(len(check.name) for check in report.checks)
    lines = []
    for check in report.checks:
        lines.append(f"{check.finding.grade:{WIDTH}}{check.name:{wide}}  {check.finding.what}")
        if check.finding.remedy:
            lines.append(f"{'':{WIDTH + wide + 2}}→ {check.finding.remedy}")
    return lines


def _table(report: Report) -> list[str]:
    if not report.rows:
        return []
    wide = max(len(row.case) for row in report.rows) + 2
    heading = f"\n{'case':{wide}}" + "".join(f"{column:{WIDTH}}" for column in CaseColumn)
    return [heading.rstrip(), *(_row(row, wide) for row in report.rows)]


def _row(row: CaseRow, wide: int) -> str:
    return (f"{row.case:{wide}}" + "".join(f"{row.cell(column).grade:{WIDTH}}" for column in CaseColumn)).rstrip()


def _reasons(report: Report) -> list[str]:
    """Why cells are not exact: each reason once, with all its cells."""
    cells: dict[Finding, list[str]] = {}
    for row in report.rows:
        for column, finding in row.cells.items():
            if finding.grade is not Grade.EXACT and finding.what:
                cells.setdefault(finding, []).append(f"{row.case}: {column}")
    lines = []
    for finding, where in cells.items():
        lines += ["", f"{', '.join(where)} ({finding.grade})", f"  {finding.what}"]
        lines += [f"  → {finding.remedy}"] if finding.remedy else []
    return lines
