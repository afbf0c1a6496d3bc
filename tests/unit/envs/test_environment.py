from typing import Any

import pytest

from stepwell.envs.environment import collect_group
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
    group, backlog = await collect_group(answers((one, ["a"]), (None, ["b"]), (two, [])), "item", 2)
    assert (group, backlog) == ({"tokens": [[1], [2]]}, ["a", "b"])


async def test_what_is_missing_for_good_is_the_last_failure() -> None:
    with pytest.raises(ValueError, match="two"):
        await collect_group(answers(({}, []), ValueError("one"), ValueError("two")), "item", 2)


async def test_what_is_missing_without_a_failure_is_no_group_and_the_backlog_is_kept() -> None:
    assert await collect_group(answers(({}, ["a"]), (None, []), (None, ["b"])), "item", 2) == (None, ["a", "b"])


async def test_a_full_group_is_not_tried_again() -> None:
    group, _ = await collect_group(answers(({"tokens": [1]}, []), ({"tokens": [2]}, [])), "item", 2)
    assert group == {"tokens": [[1], [2]]}


@pytest.mark.parametrize("answer", [{"tokens": []}, ("text", []), ({}, None), None])
async def test_an_answer_of_another_shape_is_explained(answer: Any) -> None:
    with pytest.raises(BadRequest, match="collect_trajectory returns a rollout"):
        await collect_group(answers(answer, answer), "item", 1)
