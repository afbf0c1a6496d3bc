"""Process rewards: a score for every step of a trajectory."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from pydantic import JsonValue

from stepwell.errors import RewardFailed
from stepwell.pool.api.scoring import Score
from stepwell.rewards.builtin.composition import Given, composed
from stepwell.rewards.loading import Call, load
from stepwell.rewards.sample import SIDE_CALL, Sample


def per_step(
    *, function: str, combine: Literal["mean", "sum"] = "mean", options: Mapping[str, JsonValue] | None = None
) -> Call:
    """The function's score of each step, given the trajectory as it was right after that step.

    The step rewards add up to the value: with "mean", each is its share of it. Side calls have none.
    """

    def join(sample: Sample, given: Given) -> Score:
        places = _scored_places(sample)
        if not places:
            raise RewardFailed(f"trajectory {sample.trajectory_uid!r} has no step but side calls")
        share = 1 / len(places) if combine == "mean" else 1.0
        rewards: list[float | None] = [None] * len(sample.steps)
        for place, score in zip(places, given, strict=True):
            rewards[place] = share * score.value
        return Score(
            share * sum(score.value for score in given),
            parts={f"step {place}": score.value for place, score in zip(places, given, strict=True)},
            step_rewards=tuple(rewards),
            notes="\n".join(f"step {p}: {score.notes}" for p, score in zip(places, given, strict=True) if score.notes),
        )

    return composed([load(function, options)], _after_each_step, join)


def _scored_places(sample: Sample) -> list[int]:
    return [n for n, step in enumerate(sample.steps) if not (step.untrainable or "").startswith(SIDE_CALL)]


def _after_each_step(sample: Sample) -> list[Sample]:
    return [replace(sample, steps=sample.steps[: n + 1], num_turns=n + 1) for n in _scored_places(sample)]
