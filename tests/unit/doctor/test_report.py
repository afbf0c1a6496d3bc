"""When a report is exact, and how it is shown."""

import json

from stepwell.doctor.findings import EXACT, Check, Column, Finding, Mark, Report, Row
from stepwell.doctor.report_text import as_json, coloured, plain

FINE = Check("engine", Finding(Mark.OK, "vLLM 0.32.0"))
PROVED = Row("single turn", {Column.IDS: EXACT, Column.LOGPROBS: EXACT})
GRAMMAR = Finding(Mark.UNTOLD, "written under a grammar")
BROKEN = Finding(Mark.FAULT, "no_response_ids: none", "use vLLM")


def test_exact_means_proved_and_no_fault() -> None:
    assert Report("http://e", (FINE,), (PROVED,)).is_exact
    assert not Report("http://e", (FINE,)).is_exact
    assert not Report("http://e", (FINE,), (PROVED.with_cell(Column.STREAM, BROKEN),)).is_exact
    assert not Report("http://e", (Check("Ray", BROKEN),), (PROVED,)).is_exact
    assert not Report("http://e", (FINE,), (Row("single turn", {}),)).is_exact
    assert Report("http://e", (Check("pause", Finding(Mark.WARNING, "x", "y")),), (PROVED,)).is_exact


def test_a_case_that_was_not_proved_is_not_exact() -> None:
    half = Row("tools", {Column.IDS: EXACT})
    assert not Report("http://e", (FINE,), (PROVED, half)).is_exact


def test_a_reason_is_told_once_with_all_its_cells() -> None:
    rows = (PROVED.with_cell(Column.TEXT, BROKEN), Row("tools", {Column.TEXT: BROKEN, Column.RESCORED: GRAMMAR}))
    shown = plain(Report("http://e", (FINE, Check("Ray", BROKEN)), rows))
    assert "single turn: text, tools: text (fault)\n  no_response_ids: none\n  → use vLLM\n" in shown
    assert "single turn  exact    exact    fault    –" in shown
    assert "fault    Ray     no_response_ids: none\n                 → use vLLM" in shown
    assert shown.endswith("NOT exact: 3 faults.\n")


def test_colours_change_no_letter() -> None:
    report = Report("http://e", (FINE,), (PROVED.with_cell(Column.TEXT, BROKEN),))
    text = coloured(report)
    assert text.plain == plain(report)
    assert {str(span.style) for span in text.spans} == {"green", "bold red"}


def test_json_has_every_column() -> None:
    written = json.loads(json.dumps(as_json(Report("http://e", (FINE,), (PROVED,)))))
    assert written["exact"] is True
    (case,) = written["cases"]
    assert list(case["cells"]) == list(Column)
    assert case["cells"]["stream"]["mark"] == "untold"
