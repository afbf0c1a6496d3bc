"""Functions made of others: weighted sums, length shaping, process rewards."""

import inspect
from typing import Any

import pytest

from stepwell.errors import BadRequest, RewardFailed
from stepwell.pool.api.scoring import Score
from stepwell.rewards.loading import load
from stepwell.rewards.sample import Sample
from tests.unit.rewards.texts import answered, step, trajectory

HERE = f"{__file__}:"


async def later(sample: Sample) -> Score:
    return Score(float(len(sample.response_text)), parts={"turns": sample.num_turns}, notes="counted")


def failing(sample: Sample) -> float:
    raise RewardFailed("no idea")


def nothing(sample: Sample) -> None:
    return None


def length(sample: Sample) -> float:
    return float(len(sample.response_text))


def call(name: str, sample: Sample, **options: Any) -> Score:
    result: Any = load(name, options).call(sample)
    assert isinstance(result, Score)
    return result


def test_a_weighted_sum_adds_its_parts_and_shows_them() -> None:
    of = {"exact_match": {}, "style": {"function": f"{HERE}later", "weight": 0.5}, "format_match": {"weight": -1}}
    score = call("weighted_sum", answered("Paris", "Paris"), of=of)
    assert score.value == 1 + 0.5 * 5 - 0
    assert score.parts == {
        "exact_match": 1.0,
        "style": 5.0,
        "style/turns": 1.0,
        "format_match": 0.0,
        "format_match/think": 0.0,
        "format_match/answer": 0.0,
    }
    assert score.notes == "style: counted"
    assert score.step_rewards == ()


async def test_what_is_made_of_async_functions_alone_is_async() -> None:
    part: Any = {"function": f"{HERE}later"}
    function = load("weighted_sum", {"of": {"a": part, "b": part}})
    assert function.is_async
    assert not load("weighted_sum", {"of": {"a": part, "exact_match": {}}}).is_async
    result: Any = function.call(answered("four"))
    assert inspect.isawaitable(result)
    assert (await result).value == 8.0


@pytest.mark.parametrize(("part", "said"), [("failing", "no idea"), ("nothing", "returned None")])
def test_a_part_that_fails_fails_the_whole(part: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        call("weighted_sum", answered("7", "7"), of={"exact_match": {}, "other": {"function": HERE + part}})


@pytest.mark.parametrize(
    "of", [{}, {"unheard_of": {}}, {"exact_match": {"wieght": 2}}, {"exact_match": {"options": {"key": "x"}}}]
)
def test_a_sum_of_what_there_is_not_is_refused(of: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        load("weighted_sum", {"of": of})


@pytest.mark.parametrize(("tokens", "penalty"), [(10, 0.0), (100, 0.0), (150, 0.25), (200, 0.5), (900, 0.5)])
def test_length_costs_from_the_free_tokens_on_and_not_without_bound(tokens: int, penalty: float) -> None:
    sample = trajectory(
        step("a", tokens=tokens - 5),
        step("a title", tokens=700, untrainable="side_call:title"),
        step("7", tokens=5),
        metadata={"answer": "7"},
    )
    score = call("length_shaping", sample, function="exact_match", free_tokens=100, most_tokens=200, penalty=0.5)
    assert score.value == pytest.approx(1 - penalty)
    assert score.parts == pytest.approx({"score": 1.0, "length": -penalty})


def test_a_length_that_shrinks_is_refused() -> None:
    with pytest.raises(BadRequest, match="must be below"):
        load("length_shaping", {"function": "exact_match", "free_tokens": 200, "most_tokens": 100})


STEPS = (step("a"), step("a title", untrainable="side_call:title"), step("abc"))


@pytest.mark.parametrize(
    ("combine", "value", "rewards"), [("mean", 2.0, (0.5, None, 1.5)), ("sum", 4.0, (1.0, None, 3.0))]
)
def test_every_step_has_its_score_and_side_calls_none(
    combine: str, value: float, rewards: tuple[float | None, ...]
) -> None:
    score = call("per_step", trajectory(*STEPS), function=f"{HERE}length", combine=combine)
    assert score.value == value
    assert score.step_rewards == rewards
    assert score.parts == {"step 0": 1.0, "step 2": 3.0}


async def test_a_step_is_scored_with_what_was_there_right_after_it() -> None:
    result: Any = load("per_step", {"function": f"{HERE}later"}).call(trajectory(step("a"), step("abc")))
    assert (await result).notes == "step 0: counted\nstep 1: counted"


def test_a_trajectory_of_side_calls_has_no_process_to_score() -> None:
    with pytest.raises(RewardFailed, match="no step but side calls"):
        call("per_step", trajectory(STEPS[1]), function=f"{HERE}length")


def test_what_belongs_to_no_step_is_the_outcome_reward() -> None:
    of = {"per_step": {"options": {"function": f"{HERE}length"}, "weight": 2}, "outcome": {"function": f"{HERE}length"}}
    score = call("weighted_sum", trajectory(*STEPS), of=of)
    assert score.step_rewards == (1.0, None, 3.0)
    assert (score.value, score.rest) == (7.0, 3.0)
    shaped = call(
        "length_shaping", trajectory(*STEPS), function="weighted_sum", options={"of": of}, free_tokens=0, most_tokens=8
    )
    assert shaped.step_rewards == (1.0, None, 3.0)
    assert (shaped.value, shaped.rest) == (6.5, 2.5)
