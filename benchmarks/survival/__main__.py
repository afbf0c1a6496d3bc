"""Faults in a real cluster, one row each: real Ray with several nodes, real gateway processes, a fake engine.

    python -m benchmarks.survival
    python -m benchmarks.survival --only head_10s stopped --quick

`--only` takes names of rows, or their beginnings. A row that fails or takes too long counts as missed, and so does a
figure that could not be measured.
"""

import argparse
import asyncio
import math
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.report import report
from benchmarks.survival.row import RowOutcome, SurvivalRow
from benchmarks.survival.rows import ROWS
from benchmarks.survival.soak import MINUTES, Soak

NEVER = 1e9
"""JSON has no infinity."""
ROW_TIMEOUT = 2_400.0
"""Seconds, and for the soak its minutes besides."""


async def run_row(row: SurvivalRow, *, quick: bool, timeout: float = ROW_TIMEOUT) -> RowOutcome:
    """With the time that it took and the load of the machine, which explains slow answers."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(timeout):
            outcome = await row.run(quick=quick)
    except Exception:  # noqa: BLE001 - whatever a row fails with, the others are run
        traceback.print_exc()
        outcome = RowOutcome({"failed": 1}, {"failed": 0})
    measured = {"row_s": round(time.monotonic() - began, 1), "machine_load": round(os.getloadavg()[0], 1)}
    return replace(outcome, figures={**outcome.figures, **measured})


def print_row(row: SurvivalRow, outcome: RowOutcome) -> None:
    print(f"\n{row.name}: {row.fault}: {'missed ' + ', '.join(outcome.missed) if outcome.missed else 'met'}")
    for name, value in outcome.figures.items():
        goal = f"<= {outcome.at_most[name]:g}" if name in outcome.at_most else ""
        goal = f">= {outcome.at_least[name]:g}" if name in outcome.at_least else goal
        print(f"  {name:22} {value:>10g}  {goal}", flush=True)


def chosen_rows(only: Sequence[str]) -> list[SurvivalRow]:
    """A whole name means that row alone, also if others begin with it."""
    names = {row.name for row in ROWS}
    exact, beginnings = names.intersection(only), tuple(set(only) - names)
    return [row for row in ROWS if not only or row.name in exact or row.name.startswith(beginnings)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.survival", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(row.name for row in ROWS)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"of these: {names}")
    parser.add_argument("--quick", action="store_true", help="a shorter form of each row")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="how long the soak takes")
    given = parser.parse_args()
    chosen = chosen_rows(given.only)
    if not chosen:
        parser.error(f"no row is named {' '.join(given.only)}; there are: {names}")
    figures: dict[str, float] = {}
    at_most: dict[str, float] = {}
    at_least: dict[str, float] = {}
    for row in chosen:
        timeout = ROW_TIMEOUT
        if isinstance(row, Soak):
            row, timeout = Soak(given.minutes), ROW_TIMEOUT + 60 * given.minutes
        outcome = asyncio.run(run_row(row, quick=given.quick, timeout=timeout))
        print_row(row, outcome)
        named = {name: NEVER if math.isinf(value) else value for name, value in outcome.figures.items()}
        figures |= {f"{row.name}.{name}": value for name, value in named.items()}
        at_most |= {f"{row.name}.{name}": bound for name, bound in outcome.at_most.items()}
        at_least |= {f"{row.name}.{name}": bound for name, bound in outcome.at_least.items()}
    report(figures, at_most, at_least)


if __name__ == "__main__":
    main()
