"""Groups without a trainer, and evaluating once."""

import logging
from typing import Any

import pytest

from stepwell.envs.loop import lifecycle
from stepwell.envs.scored_data import ScoredDataGroup
from tests.integration.envs.counting import CountingEnv, counting


class Written:
    def __init__(self) -> None:
        self.groups: list[ScoredDataGroup] = []

    def write(self, group: ScoredDataGroup) -> None:
        self.groups.append(group)


async def test_exactly_as_many_groups_are_written_as_were_asked_for() -> None:
    sink = Written()
    assert await lifecycle.process(counting(max_num_workers=4), 6, sink) == 6
    assert sorted(group["tokens"][0][0] for group in sink.groups) == list(range(6))


async def test_it_ends_when_there_are_no_more_items() -> None:
    env, sink = counting(), Written()
    env.last_item = 1
    assert await lifecycle.process(env, 6, sink) == 2


async def test_dropped_groups_are_made_up_for_but_not_without_end(caplog: pytest.LogCaptureFixture) -> None:
    class Dull(CountingEnv):
        def next_score(self) -> float:
            return 1.0 if self.position <= 3 else super().next_score()

    env = Dull(counting(max_num_workers=1).config)
    assert await lifecycle.process(env, 2, Written()) == 2
    assert env.failure_count.dropped == {"equal scores": 3}

    class AlwaysDull(CountingEnv):
        def next_score(self) -> float:
            return 1.0

    with caplog.at_level(logging.WARNING, "stepwell.envs"):
        assert await lifecycle.process(AlwaysDull(counting().config), 2, Written()) == 0
    assert "20 groups were begun for 2; dropped: {'equal scores': 20}" in caplog.text


async def test_a_list_of_groups_is_several_groups() -> None:
    class Paired(CountingEnv):
        async def collect_trajectories(self, item: Any) -> Any:
            group, backlog = await super().collect_trajectories(item)
            return [group, None, group], backlog

    sink = Written()
    assert await lifecycle.process(Paired(counting(max_num_workers=1).config), 3, sink) == 3
    assert [group["tokens"][0][0] for group in sink.groups] == [0, 0, 1]


async def test_an_evaluation_gives_what_the_environment_measured() -> None:
    assert await lifecycle.evaluate(counting()) == {"eval/accuracy": 1.0}
