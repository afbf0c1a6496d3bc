"""A weighted sum of reward functions, and one that also counts tokens."""

from collections.abc import Mapping

from pydantic import JsonValue

from stepwell.errors import BadRequest
from stepwell.pool.api.scoring import Score
from stepwell.rewards.builtin.composition import Given, Part, added_to_last, composed, loaded, unchanged
from stepwell.rewards.loading import Call, load
from stepwell.rewards.sample import Sample


def weighted_sum(*, of: Mapping[str, Part]) -> Call:
    """The sum of the parts' scores, each times its weight; the parts' scores stand in the score's parts by name."""
    if not of:
        raise BadRequest("a weighted sum needs at least one part")
    names, parts = list(of), list(of.values())

    def join(sample: Sample, given: Given) -> Score:
        weighted = [_times(score, part.weight) for score, part in zip(given, parts, strict=True)]
        return Score(
            sum(score.value for score in weighted),
            parts=_named(names, given),
            step_rewards=_summed(weighted),
            notes="\n".join(f"{name}: {score.notes}" for name, score in zip(names, given, strict=True) if score.notes),
        )

    return composed([loaded(part, name) for name, part in of.items()], unchanged, join)


def length_shaping(
    *,
    function: str,
    free_tokens: int,
    most_tokens: int,
    penalty: float = 1.0,
    options: Mapping[str, JsonValue] | None = None,
) -> Call:
    """The function's score less a penalty that grows from 0 at `free_tokens` to all of it at `most_tokens`.

    The tokens are those that the policy wrote, over all steps that may be trained.
    """
    if not 0 <= free_tokens < most_tokens:
        raise BadRequest(f"free_tokens ({free_tokens}) must be below most_tokens ({most_tokens}), and not below 0")

    def join(sample: Sample, given: Given) -> Score:
        (score,) = given
        written = sum(len(step.response_ids) for step in sample.steps if step.untrainable is None)
        over = min(max(written - free_tokens, 0) / (most_tokens - free_tokens), 1.0)
        return Score(
            score.value - penalty * over,
            parts={**score.parts, "score": score.value, "length": -penalty * over},
            step_rewards=added_to_last(score.step_rewards, -penalty * over),
            notes=score.notes,
        )

    return composed([load(function, options)], unchanged, join)


def _times(score: Score, weight: float) -> Score:
    rewards = tuple(None if reward is None else weight * reward for reward in score.step_rewards)
    return Score(weight * score.value, step_rewards=rewards)


def _named(names: list[str], given: Given) -> dict[str, float]:
    """A part's own parts stand under it: judge/vote 1."""
    parts = {}
    for name, score in zip(names, given, strict=True):
        parts[name] = score.value
        parts |= {f"{name}/{inner}": value for inner, value in score.parts.items()}
    return parts


def _summed(scores: list[Score]) -> tuple[float | None, ...]:
    """Step by step; what parts without step rewards gave is on the last step."""
    by_step = [score.step_rewards for score in scores if score.step_rewards]
    rewards = tuple(_sum(column) for column in zip(*by_step, strict=True))
    return added_to_last(rewards, sum(score.value for score in scores if not score.step_rewards))


def _sum(column: tuple[float | None, ...]) -> float | None:
    there = [reward for reward in column if reward is not None]
    return sum(there) if there else None
