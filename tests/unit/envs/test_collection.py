from typing import Any

import pytest

from stepwell.envs.collection import collect
from stepwell.errors import BadRequest


def answers(*given: Any) -> Any:
    left = list(given)

    async def collect_one(item: Any) -> Any:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return collect_one


async def test_what_is_missing_is_tried_again_once_and_the_backlog_is_kept() -> None:
    one, two = {"tokens": [1]}, {"tokens": [2]}
    collected = await collect(answers((one, ["a"]), (None, ["b"]), (two, [])), "item", 2)
    assert (collected.rollouts, collected.backlog, collected.failure) == ([one, two], ["a", "b"], None)


async def test_what_is_missing_for_good_is_missing_and_the_last_failure_is_known() -> None:
    collected = await collect(answers(({}, []), ValueError("one"), ValueError("two")), "item", 2)
    assert len(collected.rollouts) == 1
    assert str(collected.failure) == "two"


async def test_a_full_group_is_not_tried_again() -> None:
    collected = await collect(answers(({}, []), ({}, [])), "item", 2)
    assert len(collected.rollouts) == 2


@pytest.mark.parametrize("answer", [{"tokens": []}, ("text", []), ({}, None), None])
async def test_an_answer_of_another_shape_is_explained(answer: Any) -> None:
    with pytest.raises(BadRequest, match="collect_trajectory returns a rollout"):
        await collect(answers(answer, answer), "item", 1)
