"""When a report is exact, and how it is shown."""

import json

from stepwell.doctor.findings import EXACT, CaseColumn, CaseRow, Check, Finding, Grade, Report, as_json, coloured, plain

FINE = Check("engine", Finding(Grade.OK, "vLLM 0.32.0"))
PROVED = CaseRow("single turn", {CaseColumn.IDS: EXACT, CaseColumn.LOGPROBS: EXACT})
GRAMMAR = Finding(Grade.UNKNOWN, "written under a grammar")
BROKEN = Finding(Grade.FAULT, "no_response_ids: none", "use vLLM")


def proved_but(column: CaseColumn) -> CaseRow:
    return CaseRow(PROVED.case, {**PROVED.cells, column: BROKEN})


def test_exact_means_proved_and_no_fault() -> None:
    assert Report("http://e", (FINE,), (PROVED,)).is_exact
    assert not Report("http://e", (FINE,)).is_exact
    assert not Report("http://e", (FINE,), (proved_but(CaseColumn.STREAM),)).is_exact
    assert not Report("http://e", (Check("Ray", BROKEN),), (PROVED,)).is_exact
    assert not Report("http://e", (FINE,), (CaseRow("single turn", {}),)).is_exact
    assert Report("http://e", (Check("pause", Finding(Grade.WARNING, "x", "y")),), (PROVED,)).is_exact


def test_a_case_that_was_not_proved_is_not_exact() -> None:
    half = CaseRow("tools", {CaseColumn.IDS: EXACT})
    assert not Report("http://e", (FINE,), (PROVED, half)).is_exact


def test_a_reason_is_printed_once_with_all_its_cells() -> None:
    rows = (
        proved_but(CaseColumn.TEXT),
        CaseRow("tools", {CaseColumn.TEXT: BROKEN, CaseColumn.RESCORED: GRAMMAR}),
    )
    shown = plain(Report("http://e", (FINE, Check("Ray", BROKEN)), rows))
    assert "single turn: text, tools: text (fault)\n  no_response_ids: none\n  → use vLLM\n" in shown
    assert "single turn  exact    exact    fault    –" in shown
    assert "fault    Ray     no_response_ids: none\n                 → use vLLM" in shown
    assert shown.endswith("NOT exact: 3 faults.\n")


def test_colours_do_not_change_the_text() -> None:
    report = Report("http://e", (FINE,), (proved_but(CaseColumn.TEXT),))
    text = coloured(report)
    assert text.plain == plain(report)
    assert {str(span.style) for span in text.spans} == {"green", "bold red"}


def test_json_has_every_column() -> None:
    written = json.loads(json.dumps(as_json(Report("http://e", (FINE,), (PROVED,)))))
    assert written["exact"] is True
    (case,) = written["cases"]
    assert list(case["cells"]) == list(CaseColumn)
    assert case["cells"]["stream"]["mark"] == "untold"
