"""Reward functions made of others: a weighted sum, a length penalty, and a score for every step.

- A function made only of async ones is async; any other is not, so a part that loops or computes can be killed.
- A step keeps its own reward. What a value has beyond the step rewards is the outcome reward, which belongs to no step.
- If a part fails, the whole fails.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from pydantic import ConfigDict, JsonValue

from stepwell.errors import BadRequest, RewardFailed
from stepwell.pool.api.scoring import Score
from stepwell.rewards.function import Call, Loader, RewardFunction, as_score
from stepwell.rewards.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One function of a weighted sum, as the options describe it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    function: str = ""
    """The name of the part's function; if empty, the name of the part."""
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    weight: float = 1.0


def weighted_sum(load: Loader, /, *, of: Mapping[str, Part]) -> Call:
    """The weighted sum of the parts' scores. The score's parts hold each of them by name."""
    if not of:
        raise BadRequest("a weighted sum needs at least one part")
    names, parts = list(of), list(of.values())

    def join(sample: Sample, scores: Sequence[Score]) -> Score:
        weighted = [_multiplied(score, part.weight) for score, part in zip(scores, parts, strict=True)]
        return Score(
            sum(score.value for score in weighted),
            parts=_parts_by_name(names, scores),
            step_rewards=_summed_by_step(weighted),
            notes="\n".join(f"{name}: {score.notes}" for name, score in zip(names, scores, strict=True) if score.notes),
            steps_only=all(score.steps_only for score in scores),
        )

    functions = [load(part.function or name, dict(part.options)) for name, part in of.items()]
    return _composed(functions, lambda sample: [sample], join)


def length_shaping(
    load: Loader,
    /,
    *,
    function: str,
    free_tokens: int,
    most_tokens: int,
    penalty: float = 1.0,
    options: Mapping[str, JsonValue] | None = None,
) -> Call:
    """The function's score minus a penalty that grows from 0 at `free_tokens` to its full size at `most_tokens`.

    It counts the tokens that the policy wrote in trainable steps.
    """
    if not 0 <= free_tokens < most_tokens:
        raise BadRequest(f"free_tokens ({free_tokens}) must be below most_tokens ({most_tokens}), and not below 0")

    def join(sample: Sample, scores: Sequence[Score]) -> Score:
        (score,) = scores
        written = sum(len(step.response_ids) for step in sample.steps if step.untrainable is None)
        over = min(max(written - free_tokens, 0) / (most_tokens - free_tokens), 1.0)
        return Score(
            score.value - penalty * over,
            parts={**score.parts, "score": score.value, "length": -penalty * over},
            step_rewards=score.step_rewards,
            notes=score.notes,
        )

    return _composed([load(function, options)], lambda sample: [sample], join)


def per_step(
    load: Loader,
    /,
    *,
    function: str,
    combine: Literal["mean", "sum"] = "mean",
    options: Mapping[str, JsonValue] | None = None,
) -> Call:
    """The function's score of each step, computed on the trajectory up to and including that step.

    The step rewards add up to the value: with "mean", each is its share of the mean. Side calls have no reward.
    """

    def join(sample: Sample, scores: Sequence[Score]) -> Score:
        places = _scored_places(sample)
        if not places:
            raise RewardFailed(f"trajectory {sample.trajectory_uid!r} has no step but side calls")
        share = 1 / len(places) if combine == "mean" else 1.0
        rewards: list[float | None] = [None] * len(sample.steps)
        for place, score in zip(places, scores, strict=True):
            rewards[place] = share * score.value
        return Score(
            share * sum(score.value for score in scores),
            parts={f"step {place}": score.value for place, score in zip(places, scores, strict=True)},
            step_rewards=tuple(rewards),
            notes="\n".join(f"step {p}: {score.notes}" for p, score in zip(places, scores, strict=True) if score.notes),
        )

    return _composed([load(function, options)], _up_to_each_step, join)


def _composed(
    functions: Sequence[RewardFunction],
    split: Callable[[Sample], list[Sample]],
    join: Callable[[Sample, Sequence[Score]], Score],
) -> Call:
    """Calls every function on every sample that `split` returns, in that order; `join` makes one score of theirs."""

    def calls_for(sample: Sample) -> list[tuple[RewardFunction, Sample]]:
        return [(function, each) for each in split(sample) for function in functions]

    async def call_async(sample: Sample) -> Score:
        return join(sample, await _gather(calls_for(sample)))

    def call(sample: Sample) -> Score:
        calls = calls_for(sample)
        direct = [None if f.is_async else as_score(f.call(each), len(each.steps)) for f, each in calls]
        async_calls = [call for call in calls if call[0].is_async]
        awaited = iter(asyncio.run(_gather(async_calls)) if async_calls else [])
        return join(sample, [score or next(awaited) for score in direct])

    return call_async if all(function.is_async for function in functions) else call


async def _gather(calls: Sequence[tuple[RewardFunction, Sample]]) -> list[Score]:
    """The scores of async functions. The first failure cancels the others."""

    async def score(function: RewardFunction, sample: Sample) -> Score:
        result = function.call(sample)
        assert isinstance(result, Awaitable)
        return as_score(await result, len(sample.steps))

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(score(*call)) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _up_to_each_step(sample: Sample) -> list[Sample]:
    return [replace(sample, steps=sample.steps[: n + 1], num_turns=n + 1) for n in _scored_places(sample)]


def _scored_places(sample: Sample) -> list[int]:
    return [n for n, step in enumerate(sample.steps) if not step.is_aside]


def _multiplied(score: Score, weight: float) -> Score:
    rewards = tuple(None if reward is None else weight * reward for reward in score.step_rewards)
    return Score(weight * score.value, step_rewards=rewards)


def _parts_by_name(names: list[str], scores: Sequence[Score]) -> dict[str, float]:
    """The parts of a part have its name in front: judge/vote 1."""
    parts = {}
    for name, score in zip(names, scores, strict=True):
        parts[name] = score.value
        parts |= {f"{name}/{inner}": value for inner, value in score.parts.items()}
    return parts


def _summed_by_step(scores: list[Score]) -> tuple[float | None, ...]:
    by_step = [score.step_rewards for score in scores if score.step_rewards]
    return tuple(_sum_of_present(column) for column in zip(*by_step, strict=True))


def _sum_of_present(column: tuple[float | None, ...]) -> float | None:
    present = [reward for reward in column if reward is not None]
    return sum(present) if present else None
