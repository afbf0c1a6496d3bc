"""Does the model learn, how fast, and what do a pool and a gateway in between cost?

Three measurements, all with a real vLLM on this machine: `stepwell demo` from start to end, as a command; the same loop
in turns with a bare one (no pool, no gateway) on one engine, where a ratio is the median over rounds and the bare loop
counts in the better of two forms, with sampling during updates and without; and an agent with a slow tool (0.1 to 1 s
per call), trained synchronously (each batch waits for all its rollouts, then the model is updated) and asynchronously,
with the same number of samples.

    python -m benchmarks.learning [--task rev|tool] [--seed N] [--quick]
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.learning_rig.bare import BareLoop
from benchmarks.learning_rig.rig import SEED, TASK, Rig, Run, open_rig, settings
from benchmarks.learning_rig.slow import train_slowly
from benchmarks.report import report
from stepwell.agents.dataset import Dataset
from stepwell.demo.agent_process import GROUP
from stepwell.demo.tasks import TASKS, split
from stepwell.trainers.weight_sync import WeightSync

GROUPS = 16
STANDING = 1e-6
"""A learning rate at which the model stays what it is, for loops whose speed is compared."""
UNMEASURED = 2
"""Updates before a measured round."""
AT_MOST = {"start_reward": 0.35, "seconds": 300.0, "largest_gap": 1e-3, "slow_reward_lost": 0.05}
AT_LEAST = {"end_reward": 0.9, "of_bare_loop": 0.9, "slow_async_speedup": 1.8}

Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    updates: int | None
    """Of the demo; None for as many as its task takes."""
    rounds: int
    round_updates: int
    slow_updates: int


LONG = Length(updates=None, rounds=3, round_updates=10, slow_updates=50)
QUICK = Length(updates=5, rounds=1, round_updates=3, slow_updates=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tuple(TASKS), default=TASK)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--quick", action="store_true", help="a few updates only, to see that it runs")
    args = parser.parse_args()
    length = QUICK if args.quick else LONG
    with tempfile.TemporaryDirectory() as folder:
        figures = run_demo(args.task, args.seed, length, Path(folder) / "demo")
        with open_rig(Path(folder)) as rig:
            figures |= compare(rig, length) | slow(rig, length)
    report(figures, at_most=AT_MOST, at_least=AT_LEAST)


def run_demo(task: str, seed: int, length: Length, out: Path) -> Figures:
    """The command itself, without its pictures."""
    flags = ["--task", task, "--seed", str(seed), "--out", str(out), "--no-plot"]
    flags += [] if length.updates is None else ["--updates", str(length.updates)]
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "stepwell", "demo", *flags], check=True)
    seconds = time.monotonic() - began
    outcome = json.loads((out / "outcome.json").read_text())
    kept = {
        "start_reward": "start",
        "end_reward": "end",
        "largest_gap": "largest_gap",
        "samples_s": "samples_per_second",
    }
    return {"seconds": seconds} | {name: outcome[key] for name, key in kept.items()}


def compare(rig: Rig, length: Length) -> Figures:
    """Samples a second: ours, and the bare loop's in both its forms, in turns on the same engine."""
    forms = {"bare_in_turns": GROUPS, "bare_overlapping": 2 * GROUPS}
    measured: dict[str, list[float]] = {name: [] for name in ("ours", *forms)}
    with rig.run("compare", settings(10_000, GROUPS, rate=STANDING), ahead=1) as run:
        for _ in range(length.rounds):
            measured["ours"].append(_ours(run, length.round_updates))
            for name, ahead in forms.items():
                measured[name].append(asyncio.run(_bare(rig, ahead, length.round_updates)))
            print({name: round(values[-1], 1) for name, values in measured.items()}, flush=True)
    ratios = [ours / max(bare) for ours, *bare in zip(*measured.values(), strict=True)]
    figures = {f"{name}_samples_s": statistics.median(values) for name, values in measured.items()}
    return figures | {"of_bare_loop": statistics.median(ratios)}


def _ours(run: Run, updates: int) -> float:
    run.agents.train()
    for _ in range(UNMEASURED):
        run.trainer.step()
    began = time.monotonic()
    for _ in range(updates):
        run.trainer.step()
    seconds = time.monotonic() - began
    run.agents.stop()
    return updates * GROUPS * GROUP / seconds


async def _bare(rig: Rig, ahead: int, updates: int) -> float:
    task = TASKS[TASK]
    samples, _ = split(task, SEED)
    sync = WeightSync([rig.engine], transfer=rig.transfer())
    given = settings(10_000, GROUPS, rate=STANDING)
    loop = BareLoop(rig.engine, task, Dataset(samples, seed=SEED), rig.model, sync, given, ahead)
    return await loop.run(updates)


def slow(rig: Rig, length: Length) -> Figures:
    sync_seconds, sync_reward = train_slowly(rig, length.slow_updates, is_async=False)
    async_seconds, async_reward = train_slowly(rig, length.slow_updates, is_async=True)
    return {
        "slow_sync_seconds": sync_seconds,
        "slow_async_seconds": async_seconds,
        "slow_sync_reward": sync_reward,
        "slow_async_reward": async_reward,
        "slow_async_speedup": sync_seconds / async_seconds,
        "slow_reward_lost": sync_reward - async_reward,
    }


if __name__ == "__main__":
    main()
