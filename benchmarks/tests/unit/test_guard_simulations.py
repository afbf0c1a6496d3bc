"""The simulated canaries of `benchmarks.guard`, fewer of them, and the tables that it writes into docs/guard.md."""

import pytest

from benchmarks.guard import (
    AT_MOST,
    BEGIN,
    MARGINS,
    PAGE,
    RATES,
    at_most,
    cell,
    cell_name,
    chain,
    measure,
    tables,
    validation,
    with_tables,
    wrong,
)
from benchmarks.results import read_results

RUNS = 150
NOISE = 3 * (AT_MOST * (1.0 - AT_MOST) / RUNS) ** 0.5
"""Three standard deviations of a rate over the runs."""


@pytest.mark.parametrize("margins", MARGINS)
@pytest.mark.parametrize("rate", RATES)
def test_few_decisions_about_a_canary_are_wrong_at_any_rate(rate: float, margins: float) -> None:
    figures, name = cell(rate, margins, RUNS), cell_name(rate, margins)
    assert figures[f"{name}_promoted"] + figures[f"{name}_rolled_back"] == pytest.approx(1.0), "within a day"
    if (figure := wrong(rate, margins)) is not None:
        assert figures[figure] <= AT_MOST + NOISE


def test_a_slow_canary_is_overdue_and_decided_later_by_evidence() -> None:
    assert cell(1, 0.0, RUNS)["rate_1_margins_0_overdue"] > 0.9


def test_few_equal_versions_are_refused_and_great_losses_are() -> None:
    figures = validation(100, RUNS) | chain(100, RUNS // 20)
    assert figures["validation_100_equal_refused"] <= AT_MOST + NOISE
    assert figures["validation_100_equal_refused_after_100"] <= AT_MOST + NOISE
    assert figures["validation_100_loss_30_refused"] > 0.95


def test_every_wrong_decision_has_a_target() -> None:
    figures = measure(1)
    assert set(at_most(figures)) <= figures.keys()
    assert len(at_most(figures)) == 3 * len(RATES) + 5
    assert tables(figures).count("\n") == 2 + len(RATES) * len(MARGINS) + 2 + 4


def test_the_tables_of_the_page_are_those_of_the_kept_result() -> None:
    page = PAGE.read_text()
    assert BEGIN in page
    assert page == with_tables(page, read_results()["guard"].figures), "run python -m benchmarks.guard --docs"
