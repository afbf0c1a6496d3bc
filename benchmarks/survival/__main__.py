"""Faults in a real cluster, one row each: real Ray with several nodes, real gateway processes, a fake engine.

    python -m benchmarks.survival
    python -m benchmarks.survival --only head_10s --quick

`--only` takes the name of a row, or the beginning of several. A figure that could not be measured counts as missed.
"""

import argparse
import asyncio
import math

from benchmarks.report import report
from benchmarks.survival.gateways import SeveralGateways
from benchmarks.survival.head import LostHead
from benchmarks.survival.row import RowOutcome, SurvivalRow
from benchmarks.survival.stopped_shard import StoppedShard

ROWS: tuple[SurvivalRow, ...] = (
    SeveralGateways(),
    LostHead(10, redis=False),
    LostHead(10, redis=True),
    LostHead(90, redis=False),
    LostHead(90, redis=True),
    StoppedShard(),
)
NEVER = 1e9
"""JSON has no infinity."""


def print_row(row: SurvivalRow, outcome: RowOutcome) -> None:
    print(f"\n{row.name}: {row.fault}: {'missed ' + ', '.join(outcome.missed) if outcome.missed else 'met'}")
    for name, value in outcome.figures.items():
        goal = f"<= {outcome.at_most[name]:g}" if name in outcome.at_most else ""
        goal = f">= {outcome.at_least[name]:g}" if name in outcome.at_least else goal
        print(f"  {name:22} {value:>10g}  {goal}", flush=True)


def chosen_rows(only: str) -> list[SurvivalRow]:
    return [row for row in ROWS if row.name == only] or [row for row in ROWS if row.name.startswith(only)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help=f"one of: {', '.join(row.name for row in ROWS)}")
    parser.add_argument("--quick", action="store_true", help="a shorter form of each row")
    given = parser.parse_args()
    figures: dict[str, float] = {}
    at_most: dict[str, float] = {}
    at_least: dict[str, float] = {}
    for row in chosen_rows(given.only):
        outcome = asyncio.run(row.run(quick=given.quick))
        print_row(row, outcome)
        named = {name: NEVER if math.isinf(value) else value for name, value in outcome.figures.items()}
        figures |= {f"{row.name}.{name}": value for name, value in named.items()}
        at_most |= {f"{row.name}.{name}": bound for name, bound in outcome.at_most.items()}
        at_least |= {f"{row.name}.{name}": bound for name, bound in outcome.at_least.items()}
    report(figures, at_most, at_least)


if __name__ == "__main__":
    main()
