"""The line that says how many of Atropos' environments ran, and how many did not."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.originals.atropos.table import DO_NOT_START

TEST = "test_the_environment_starts_and_its_first_group_reaches_the_trainer"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports: Sequence[pytest.TestReport] = [
        report
        for kind in ("passed", "failed", "skipped")
        for report in terminalreporter.stats.get(kind, ())
        if TEST in report.nodeid
    ]
    if reports:
        marks = [mark for report in reports for name, mark in report.user_properties if name == "atropos"]
        counts = (
            f"{marks.count('started')} started, {marks.count('made a group')} made a group",
            f"{sum(report.skipped for report in reports)} skipped, {sum(report.failed for report in reports)} failed",
            f"{len(DO_NOT_START)} do not work with atroposlib itself",
        )
        terminalreporter.write_line(f"Atropos environments: {', '.join(counts)}")
