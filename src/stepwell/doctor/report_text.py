"""The report on a screen: checks, the table, and below it why a cell is not exact. A terminal adds colours."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from stepwell.doctor.findings import CANNOT_TELL, Column, Finding, Mark, Report, Row
from stepwell.steps.step import Json

if TYPE_CHECKING:
    from rich.text import Text

WIDTH = 9
"""Of a cell."""
COLOURS: Mapping[Mark, str] = {Mark.EXACT: "green", Mark.OK: "green", Mark.WARNING: "yellow", Mark.FAULT: "bold red"}


def plain(report: Report) -> str:
    return "\n".join(
        (
            f"engine {report.engine}\n",
            *_checks(report),
            *_table(report),
            *_remarks(report),
            "\nNot to be told from outside:",
            *(f"  {line}" for line in CANNOT_TELL),
            f"\n{verdict(report)}\n",
        )
    )


def coloured(report: Report) -> "Text":
    from rich.text import Text

    text = Text(plain(report))
    for mark, colour in COLOURS.items():
        text.highlight_regex(rf"(?m)(?<![\w,]){mark}(?=\s\s|\s*$)", colour)
    return text


def as_json(report: Report) -> dict[str, Json]:
    return {
        "engine": report.engine,
        "exact": report.is_exact,
        "checks": [{"name": check.name, **_finding(check.finding)} for check in report.checks],
        "cases": [
            {"case": row.case, "cells": {str(column): _finding(row.cell(column)) for column in Column}}
            for row in report.rows
        ],
        "cannot_tell": list(CANNOT_TELL),
    }


def verdict(report: Report) -> str:
    if report.is_exact:
        return "Exact: what a gateway records of this engine is what it sampled."
    faults = sum(1 for _ in report.faults())
    return f"NOT exact: {faults} {'fault' if faults == 1 else 'faults'}." if faults else "NOT proved exact."


def _finding(finding: Finding) -> dict[str, Json]:
    return {**asdict(finding), "mark": str(finding.mark) if finding.mark is not Mark.UNTOLD else "untold"}


def _checks(report: Report) -> list[str]:
    wide = max(len(check.name) for check in report.checks)
    lines = []
    for check in report.checks:
        lines.append(f"{check.finding.mark:{WIDTH}}{check.name:{wide}}  {check.finding.what}")
        if check.finding.remedy:
            lines.append(f"{'':{WIDTH + wide + 2}}→ {check.finding.remedy}")
    return lines


def _table(report: Report) -> list[str]:
    if not report.rows:
        return []
    wide = max(len(row.case) for row in report.rows) + 2
    heading = f"\n{'case':{wide}}" + "".join(f"{column:{WIDTH}}" for column in Column)
    return [heading.rstrip(), *(_row(row, wide) for row in report.rows)]


def _row(row: Row, wide: int) -> str:
    return (f"{row.case:{wide}}" + "".join(f"{row.cell(column).mark:{WIDTH}}" for column in Column)).rstrip()


def _remarks(report: Report) -> list[str]:
    """Why cells are not exact, each reason once with all the cells it is true of."""
    cells: dict[Finding, list[str]] = {}
    for row in report.rows:
        for column, finding in row.cells.items():
            if finding.mark is not Mark.EXACT and finding.what:
                cells.setdefault(finding, []).append(f"{row.case}: {column}")
    lines = []
    for finding, where in cells.items():
        lines += ["", f"{', '.join(where)} ({finding.mark})", f"  {finding.what}"]
        lines += [f"  → {finding.remedy}"] if finding.remedy else []
    return lines
