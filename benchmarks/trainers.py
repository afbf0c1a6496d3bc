"""What does it cost a trainer to get its batches from a pool? Samples a second and the share of time it waits.

Agents play the demo's tool task through a real gateway and a real vLLM, and their rollouts are recorded once. Then
every trainer takes the same updates on the same rollouts twice, in turns: leased from a real pool through Stepwell's
integration, and fed from memory by the trainer's own means, without Stepwell. A ratio is the median over the rounds,
and the losses of both runs must be the same.

- Measured: leases, the transfer from the pool's process, rows and advantages, acknowledgement, and whatever of it takes
  CPU time from the trainer.
- Waiting is the time a trainer spends in its fetch, of the run with the pool. All data is there before: it shows what
  Stepwell lets a trainer wait for, and not how long agents take.
- Not measured here: weight sync. In both runs, weights go to no engine.
- The reference trainer is also measured live: agents sample from the engine that it syncs (`ours_live_*`, without
  goals). There it waits for agents, mostly. `benchmarks.learning` compares that loop with a bare one.

A trainer whose environment is not installed (scripts/trainer_envs.py) is left out, and the output says so. The short
form has the fake engine, a random model and few updates, and no live part: it shows that everything runs.

    python -m benchmarks.trainers [--only NAME] [--quick]
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import report
from benchmarks.trainers_rig.live import LiveLength
from benchmarks.trainers_rig.row import TrainerRow
from benchmarks.trainers_rig.rows import ROWS
from benchmarks.trainers_rig.stage import Stage, open_short_stage, open_stage
from benchmarks.trainers_rig.timed_run import Length, figures_of

AT_LEAST = 0.9
"""Of the samples per second without Stepwell."""
LONG = Length(rounds=7, updates=20)
QUICK = Length(rounds=1, updates=3, unmeasured=1, groups=4)
LIVE = LiveLength(unmeasured=3, updates=10)

Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[row.name for row in ROWS], help="one trainer")
    parser.add_argument("--quick", action="store_true", help="a few updates only, to see that it runs")
    args = parser.parse_args()
    rows = [row for row in ROWS if args.only in (None, row.name)]
    with tempfile.TemporaryDirectory() as folder:
        figures = measure_shortly(Path(folder), rows) if args.quick else measure(Path(folder), rows)
    promised = [] if args.quick else [name for name in figures if name.endswith("_of_memory")]
    report(figures, at_least=dict.fromkeys(promised, AT_LEAST))


def measure(folder: Path, rows: Sequence[TrainerRow]) -> Figures:
    with open_stage(folder, LONG, LIVE) as (stage, live):
        return compare(stage, rows, LONG) | live


def measure_shortly(folder: Path, rows: Sequence[TrainerRow]) -> Figures:
    with open_short_stage(folder, QUICK) as stage:
        return compare(stage, rows, QUICK)


def compare(stage: Stage, rows: Sequence[TrainerRow], length: Length) -> Figures:
    figures: Figures = {}
    print(f"{'':<10}{'samples/s':>12}{'from memory':>14}{'ratio':>8}{'waiting':>10}")
    for row in rows:
        if not row.is_installed:
            print(f"{row.name:<10} is not installed: python scripts/trainer_envs.py {row.environment}", flush=True)
            continue
        figures |= (measured := figures_of(row.name, row.measure(stage, length)))
        rate, memory, ratio, waiting = measured.values()
        print(f"{row.name:<10}{rate:>12.1f}{memory:>14.1f}{ratio:>8.3f}{waiting:>10.1%}", flush=True)
    return figures


if __name__ == "__main__":
    main()
