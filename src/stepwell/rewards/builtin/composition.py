"""Reward functions made of others.

What always holds: a function made of async ones alone is async, any other is not, so that a part that loops or computes
stays where it can be killed; where a Score has step rewards, they add up to its value, for a trainer sums them; a part
that fails fails the whole.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import ConfigDict, JsonValue

from stepwell.pool.api.scoring import Score
from stepwell.rewards.attempt import as_score
from stepwell.rewards.loading import Call, RewardFunction, load
from stepwell.rewards.sample import Sample

Given = Sequence[Score]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One function of a weighted sum, as it is written in the options."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    function: str = ""
    """Its name; empty: what the part itself is called."""
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    weight: float = 1.0


def composed(
    functions: Sequence[RewardFunction], split: Callable[[Sample], list[Sample]], join: Callable[[Sample, Given], Score]
) -> Call:
    """Every function on every sample that `split` gives, in that order; `join` makes one score of theirs."""

    def asked(sample: Sample) -> list[tuple[RewardFunction, Sample]]:
        return [(function, each) for each in split(sample) for function in functions]

    async def all_at_once(sample: Sample) -> Score:
        return join(sample, await _gathered(asked(sample)))

    def in_turn(sample: Sample) -> Score:
        pairs = asked(sample)
        given = [None if function.is_async else _called(function, each) for function, each in pairs]
        waiting = [pair for pair in pairs if pair[0].is_async]
        awaited = iter(asyncio.run(_gathered(waiting)) if waiting else [])
        return join(sample, [score or next(awaited) for score in given])

    return all_at_once if all(function.is_async for function in functions) else in_turn


def _called(function: RewardFunction, sample: Sample) -> Score:
    return as_score(function.call(sample), len(sample.steps))


async def _gathered(pairs: Sequence[tuple[RewardFunction, Sample]]) -> list[Score]:
    """The scores of async functions. The first failure ends the others."""

    async def awaited(function: RewardFunction, sample: Sample) -> Score:
        result = function.call(sample)
        assert isinstance(result, Awaitable)
        return as_score(await result, len(sample.steps))

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(awaited(*pair)) for pair in pairs]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def unchanged(sample: Sample) -> list[Sample]:
    return [sample]


def loaded(part: Part, name: str = "") -> RewardFunction:
    return load(part.function or name, dict(part.options))


def added_to_last(step_rewards: Sequence[float | None], extra: float) -> tuple[float | None, ...]:
    """Step rewards, with something that belongs to the whole added to the last that there is."""
    rewards = list(step_rewards)
    scored = [place for place, reward in enumerate(rewards) if reward is not None]
    if scored:
        rewards[scored[-1]] = (rewards[scored[-1]] or 0.0) + extra
    return tuple(rewards)
