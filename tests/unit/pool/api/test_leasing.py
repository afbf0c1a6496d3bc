import pytest

from stepwell.errors import BadRequest
from stepwell.pool.api.leasing import (
    BatchRequest,
    BatchTerms,
    Order,
    ReadyGroups,
    Unit,
    merge_ready_groups,
    read_batch_request,
)
from stepwell.steps.step import Exactness


def test_defaults_are_those_of_the_request() -> None:
    assert read_batch_request(3) == BatchRequest(count=3, channel="train")


def test_words_become_what_they_name() -> None:
    assert read_batch_request(
        2, channel="validation", unit="steps", order="strict", min_exactness="engine", untrainable=True
    ) == BatchRequest(
        count=2,
        channel="validation",
        unit=Unit.STEPS,
        order=Order.STRICT,
        min_exactness=Exactness.ENGINE,
        untrainable=True,
    )


@pytest.mark.parametrize(
    ("count", "terms", "reason"),
    [
        (0, BatchTerms(unit="steps"), "at least one of its steps, not 0"),
        (1, BatchTerms(history=1.5), "from 0 to 1, not 1.5"),
        (1, BatchTerms(min_exactness="perfect"), "'perfect' is not a valid Exactness"),
        (1, BatchTerms(order="random"), "'random' is not a valid Order"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(count: int, terms: BatchTerms, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        read_batch_request(count, **terms)


def test_the_ready_groups_of_shards_add_up() -> None:
    merged = merge_ready_groups(
        [ReadyGroups({"a": {2: 1}}), ReadyGroups({"a": {2: 2, 3: 1}, "b": {1: 1}}), ReadyGroups({})]
    )
    assert merged.groups == {"a": {2: 3, 3: 1}, "b": {1: 1}}
