"""The line that says how many of Atropos' environments ran, and how many did not."""

from collections.abc import Sequence
from typing import Any

import pytest

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
        terminalreporter.write_line(
            f"Atropos' environments: {marks.count('started')} started, {marks.count('made a group')} of them made a"
            f" group, {sum(report.skipped for report in reports)} skipped, {sum(report.failed for report in reports)} failed"
        )
