"""The benchmark of trainers in its quick form, and what it refuses to compare."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trainers_rig.recorded import learnable_groups
from benchmarks.trainers_rig.rows import ROWS
from benchmarks.trainers_rig.timed_run import Length, Round, TimedRun, figures_of
from benchmarks.trainers_rig.verl import timed_run
from rig.builders import make_step
from rig.trainers.process import trainer_python
from stepwell.pool.client.batch import make_batch
from stepwell.steps.columns import pack
from stepwell.steps.step import Step

CHECKOUT = Path(__file__).parents[3]
RUN = TimedRun(samples=100, seconds=2.0, waited=0.5, losses=[0.1, -0.2])


def figures_told(trainer: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.trainers", "--quick", "--only", trainer],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["ok"] is True
    figures: dict[str, float] = told["figures"]
    return figures


def check(trainer: str, figures: dict[str, float]) -> None:
    kinds = ("samples_s", "from_memory_samples_s", "of_memory", "waiting")
    assert list(figures) == [f"{trainer}_{kind}" for kind in kinds]
    assert all(figures[f"{trainer}_{kind}"] > 0 for kind in kinds)
    assert figures[f"{trainer}_waiting"] < 1


@pytest.mark.nightly
def test_the_reference_trainer_is_compared_with_itself_fed_from_memory() -> None:
    check("ours", figures_told("ours"))


@pytest.mark.nightly
@pytest.mark.parametrize("trainer", [row.name for row in ROWS if row.environment is not None])
def test_every_other_trainer_is_compared_with_itself_fed_from_memory(trainer: str) -> None:
    (environment,) = [row.environment for row in ROWS if row.name == trainer]
    assert environment is not None
    trainer_python(environment)
    check(trainer, figures_told(trainer))


def test_groups_are_recorded_if_something_can_be_learned_from_them() -> None:
    def group(name: str, answers: list[int], rewards: list[float]) -> list[Step]:
        return [
            make_step(f"{name}-{n}", response_ids=[answer], reward=reward)
            for n, (answer, reward) in enumerate(zip(answers, rewards, strict=True))
        ]

    steps = [
        *group("learnable", [1, 2], [0.0, 1.0]),
        *group("the same answers", [1, 1], [0.0, 1.0]),
        *group("the same rewards", [1, 2], [1.0, 1.0]),
    ]
    (kept,) = learnable_groups(make_batch(pack(steps), [2, 2, 2]))
    assert [(rollout.steps[0].trajectory_uid, rollout.reward) for rollout in kept] == [
        ("learnable-0", 0.0),
        ("learnable-1", 1.0),
    ]


def test_the_time_of_verl_is_the_median_of_its_measured_updates() -> None:
    seconds = [90.0, 4.0, 1.0, 2.0]
    told = [
        {"timing_s/step": step, "timing_s/gen": step / 8, "actor/pg_loss": number / 10}
        for number, step in enumerate(seconds)
    ]
    run = timed_run(told, Length(rounds=1, updates=3, unmeasured=1, groups=2, group_size=4))
    assert run == TimedRun(samples=24, seconds=6.0, waited=0.75, losses=[0.0, 0.1, 0.2, 0.3])


def test_figures_are_medians_over_the_rounds() -> None:
    speeds = [(2.0, 1.0), (2.0, 1.8), (2.0, 2.0)]
    rounds = [Round(replace(RUN, seconds=pool), replace(RUN, seconds=memory)) for pool, memory in speeds]
    assert figures_of("a", rounds) == {
        "a_samples_s": 50.0,
        "a_from_memory_samples_s": pytest.approx(100 / 1.8),
        "a_of_memory": pytest.approx(0.9),
        "a_waiting": 0.25,
    }


@pytest.mark.parametrize(
    "other",
    [replace(RUN, losses=[0.1, -0.21]), replace(RUN, samples=99)],
    ids=["other losses", "other samples"],
)
def test_runs_that_did_not_train_the_same_are_not_compared(other: TimedRun) -> None:
    with pytest.raises(AssertionError):
        figures_of("a", [Round(RUN, other)])


def test_runs_that_trained_nothing_are_not_compared() -> None:
    nothing = replace(RUN, losses=[0.0, 0.0])
    with pytest.raises(AssertionError, match="trained nothing"):
        figures_of("a", [Round(nothing, nothing)])
