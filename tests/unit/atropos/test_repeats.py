from typing import Any

import pytest

from stepwell.atropos.repeats import WINDOW, Repeats, content_digest
from stepwell.wire.scored_groups import ScoredGroup, group_from_json


def group(**changes: Any) -> ScoredGroup:
    sent = {"tokens": [[1, 2], [3, 4]], "masks": [[1, 2], [-100, 4]], "scores": [0, 1], "images": {"a": 1, "b": 2}}
    return group_from_json({**sent, **changes})


def test_the_same_content_has_the_same_name_for_a_while() -> None:
    repeats = Repeats()
    first = repeats.by_content("train", group(), 0)
    assert repeats.by_content("train", group(), WINDOW) == first
    later = repeats.by_content("train", group(), WINDOW + 1)
    assert later != first
    assert repeats.by_content("train", group(), 2 * WINDOW) == later


def test_a_key_has_the_same_name_for_ever_in_every_door() -> None:
    name = Repeats().by_key("train", "key", 0)
    assert Repeats().by_key("train", "key", 0) == name
    others = {Repeats().by_key(*other) for other in (("judge", "key", 0), ("train", "yek", 0), ("train", "key", 1))}
    assert len(others | {name}) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [[1, 2], [3, 5]]},
        {"tokens": [[1, 2, 3], [4]], "masks": [[1, 2, -100], [4]]},
        {"masks": [[1, 2], [3, 4]]},
        {"scores": [0, 1.5]},
        {"inference_logprobs": [[0, 0], [0, 0]]},
        {"policy_versions": [1, 2]},
        {"env_id": 1},
        {"images": {"a": 1, "b": 3}},
        {"overrides": [{}, {"x": 1}]},
    ],
)
def test_a_difference_in_anything_is_a_difference_in_name(change: dict[str, Any]) -> None:
    assert content_digest("train", group(**change)) != content_digest("train", group())


def test_the_order_of_keys_is_no_difference() -> None:
    assert content_digest("train", group(images={"b": 2, "a": 1})) == content_digest("train", group())
