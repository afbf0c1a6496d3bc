"""The line that says how many of Atropos' environments ran, and how many did not."""

from collections.abc import Sequence
from typing import Any

import pytest

TEST = "test_the_environment_starts_and_its_first_group_reaches_the_trainer"
PROPERTY = "atropos"
STARTED, MADE_A_GROUP = "started", "made a group"


class EnvironmentCounts:
    """A plugin of the process that prints the summary: with -n, that is another one than runs the tests."""

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        stats = terminalreporter.stats
        kinds = ("passed", "failed", "error", "skipped")
        reports = [report for kind in kinds for report in stats.get(kind, ()) if TEST in report.nodeid]
        if reports:
            terminalreporter.write_line(summary(reports))


def summary(reports: Sequence[pytest.TestReport]) -> str:
    from tests.originals.atropos.table import DO_NOT_START  # needed by few runs

    notes = [note for report in reports for name, note in report.user_properties if name == PROPERTY]
    counts = (
        f"{notes.count(STARTED)} started, {notes.count(MADE_A_GROUP)} of them made a group",
        f"{sum(report.skipped for report in reports)} skipped, {sum(report.failed for report in reports)} failed",
        f"{len(DO_NOT_START)} do not work with atroposlib itself",
    )
    return f"Atropos environments: {', '.join(counts)}"
