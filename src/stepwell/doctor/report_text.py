"""The printed report: checks, the table of cases, and the reasons why cells are not exact. A terminal adds colours."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stepwell.doctor.findings import CANNOT_TELL, CaseColumn, CaseRow, Finding, Grade, Report
from stepwell.steps.step import Json

if TYPE_CHECKING:
    from rich.text import Text

WIDTH = 9
"""Characters of a cell."""
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
