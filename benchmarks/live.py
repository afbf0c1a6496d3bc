"""How many rollouts does a model need to learn from live sessions, with each baseline?

The same questions come in two ways: as groups of 4 rollouts of one question, with GRPO's baseline, and as live
sessions, which are groups of one, with each baseline. Counted are the rollouts until the expected reward on held-out
questions is 0.8, as the median over several seeds. A run that has not got there counts with its budget.

Pool, rows, baselines, loss and trainer are the real ones: AsyncTrainer over a DataPool in this process. The policy is
the demo's tiny model on its task `rev`. It is sampled in this process from the newest weights, without vLLM and without
a gateway, so that the comparison takes minutes on two cores. Its expected reward is computed, not estimated.

    python -m benchmarks.live [--seeds N] [--quick]
"""

import argparse
import logging
import statistics
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.live_rig.policy import LocalPolicy, warmed_up_model, words_of
from benchmarks.live_rig.traffic import LocalDataPool, Traffic
from benchmarks.report import report
from stepwell.errors import NothingLearned
from stepwell.steps.advantages import BaselineKind
from stepwell.trainers.settings import Settings
from stepwell.trainers.trainer import AsyncTrainer

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

WANTED = 0.8
"""Expected reward."""
ROLLOUTS = 64
"""Per update, however they are grouped."""
RATE = 7e-4
"""The learning rate, which does not fall: the budget does not change the course."""
SIBLINGS = 4
AT_LEAST = {"groups_of_4_reached": 1.0, "live_running_reached": 1.0}
AT_MOST = {"live_group_reached": 0.0, "live_group_moved": 0.0}
QUICK_AT_LEAST = {"groups_of_4_moved": 1e-6, "live_running_moved": 1e-6}
QUICK_AT_MOST = {"live_group_moved": 0.0}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of learning."""

    name: str
    siblings: int
    baseline: BaselineKind
    rewards: tuple[float, float] = (0.0, 1.0)
    """Of a wrong answer, and of a right one. All baselines but `none` give the same advantages for other numbers."""

    def settings(self) -> Settings:
        return Settings(
            groups=ROLLOUTS // self.siblings,
            baseline=self.baseline,
            fallback_baseline="none",
            learning_rate=RATE,
            final_rate=1.0,
        )


ARMS = (
    Arm("groups_of_4", SIBLINGS, "group"),
    Arm("live_group", 1, "group"),
    Arm("live_leave_one_out", 1, "leave_one_out"),
    Arm("live_batch", 1, "batch"),
    Arm("live_running", 1, "running"),
    Arm("live_none", 1, "none"),
    Arm("live_none_signed", 1, "none", rewards=(-1.0, 1.0)),
)


@dataclass(frozen=True, slots=True)
class Length:
    budget: int
    """Rollouts of one run at most."""
    warm_up_steps: int


LONG = Length(budget=20_480, warm_up_steps=400)
QUICK = Length(budget=4 * ROLLOUTS, warm_up_steps=60)


@dataclass(frozen=True, slots=True)
class Course:
    """What one run came to."""

    rollouts: int
    """Until the wanted reward, or all."""
    start: float
    """Expected reward before the training."""
    reward: float
    """Expected reward at the end."""
    moved: float
    """The largest change of a weight."""
    refusal: str = ""
    """What the trainer said when it stopped because it learned nothing."""

    @property
    def has_reached(self) -> bool:
        return self.reward >= WANTED


def run(arm: Arm, warmed_up: "Qwen2ForCausalLM", seed: int, budget: int) -> Course:
    words, held_out = words_of(seed)
    model = deepcopy(warmed_up)
    pool, policy = LocalDataPool(), LocalPolicy(model, seed)
    traffic = Traffic(pool, policy, words, arm.siblings, arm.rewards, seed)
    trainer = AsyncTrainer(pool, model, settings=arm.settings())
    start = reward = policy.expected_reward(held_out)
    rollouts, refusal = 0, ""
    while rollouts < budget and reward < WANTED and not refusal:
        traffic.ask(ROLLOUTS)
        rollouts += ROLLOUTS
        try:
            trainer.step()
        except NothingLearned as nothing:
            refusal = str(nothing)
        reward = policy.expected_reward(held_out)
    return Course(rollouts, start, reward, largest_change(warmed_up, model), refusal)


def largest_change(before: torch.nn.Module, after: torch.nn.Module) -> float:
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    return max((new - old).abs().max().item() for old, new in pairs)


def figures_of(arm: Arm, courses: Sequence[Course], budget: int) -> dict[str, float]:
    return {
        f"{arm.name}_reached": statistics.fmean(course.has_reached for course in courses),
        f"{arm.name}_rollouts": statistics.median(c.rollouts if c.has_reached else budget for c in courses),
        f"{arm.name}_reward": statistics.median(course.reward for course in courses),
        f"{arm.name}_moved": max(course.moved for course in courses),
    }


def measure(length: Length, *, seeds: int, arms: Sequence[Arm] = ARMS) -> dict[str, float]:
    courses: dict[str, list[Course]] = {arm.name: [] for arm in arms}
    for seed in range(seeds):
        warmed_up = warmed_up_model(seed, length.warm_up_steps)
        for arm in arms:
            course = run(arm, warmed_up, seed, length.budget)
            courses[arm.name].append(course)
            print(
                f"seed {seed}  {arm.name:<20} {course.start:.3f} -> {course.reward:.3f} "
                f"after {course.rollouts:6d} rollouts  {course.refusal}",
                flush=True,
            )
    figures: dict[str, float] = {}
    for arm in arms:
        figures |= figures_of(arm, courses[arm.name], length.budget)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="four updates each, to see that it runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("stepwell").setLevel(logging.ERROR)  # what a trainer says when it stops is printed below
    if args.quick:
        report(measure(QUICK, seeds=1), at_most=QUICK_AT_MOST, at_least=QUICK_AT_LEAST)
    else:
        report(measure(LONG, seeds=args.seeds), at_most=AT_MOST, at_least=AT_LEAST)


if __name__ == "__main__":
    main()
