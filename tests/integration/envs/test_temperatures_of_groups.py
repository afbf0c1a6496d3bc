"""Groups of environments that tokenize texts themselves have the temperature that their answers were sampled at."""

from collections.abc import Sequence
from typing import Any

import pytest
from stepwell.steps.trainable import PROCESSED, RAW

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from stepwell.envs import APIServerConfig, BaseEnv, BaseEnvConfig, Item, ScoredDataGroup
from stepwell.envs.loop import lifecycle

QUESTION = [{"role": "user", "content": "What is 1 + 1?"}]


class TextEnv(BaseEnv):
    """As most of Atropos' environments: it samples text, and makes tokens of it itself."""

    calls: Sequence[dict[str, Any]] = ()
    """Arguments of the calls for each group."""
    is_managed = False
    of_ids = False
    """Does it ask for token ids with log-probabilities?"""

    async def get_next_item(self) -> Item:
        return 1

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        for call in self.calls:
            if self.of_ids:
                await self.server.tokens_and_logprobs_completion(prompt="Once", max_tokens=8, **call)
            elif self.is_managed:
                async with self.server.managed_server() as managed:
                    await managed.chat_completion(messages=QUESTION, max_tokens=8, **call)
            else:
                await self.server.chat_completion(messages=QUESTION, max_tokens=8, **call)
        return {"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [0.0, 1.0]}, []


class Kept:
    def __init__(self) -> None:
        self.groups: list[Any] = []

    def write(self, group: ScoredDataGroup) -> None:
        self.groups.append(group)


async def group_of(url: str, *calls: dict[str, Any], is_managed: bool = False, of_ids: bool = False) -> Any:
    env = TextEnv(BaseEnvConfig(group_size=2), [APIServerConfig(base_url=f"{url}/v1", model_name="tiny")])
    env.calls, env.is_managed, env.of_ids = calls, is_managed, of_ids
    kept = Kept()
    assert await lifecycle.process(env, 1, kept) == 1
    return kept.groups[0]


@pytest.mark.parametrize("is_managed", [False, True])
async def test_the_temperature_that_all_calls_asked_for(engine: FakeEngine, is_managed: bool) -> None:
    group = await group_of(engine.url, {"temperature": 0.7}, {"temperature": 0.7, "n": 2}, is_managed=is_managed)
    assert group["temperatures"] == [0.7, 0.7]


async def test_none_if_calls_asked_for_several(engine: FakeEngine) -> None:
    assert "temperatures" not in await group_of(engine.url, {"temperature": 0.7}, {"temperature": 0.0})


async def test_none_if_a_call_asked_for_none(engine: FakeEngine) -> None:
    assert "temperatures" not in await group_of(engine.url, {"temperature": 0.7}, {})


async def test_none_without_a_call(engine: FakeEngine) -> None:
    assert "temperatures" not in await group_of(engine.url)


async def test_calls_of_evaluations_do_not_count(engine: FakeEngine) -> None:
    group = await group_of(engine.url, {"temperature": 0.7}, {"temperature": 0.0, "split": "eval"})
    assert group["temperatures"] == [0.7, 0.7]


@pytest.mark.parametrize("is_managed", [False, True])
async def test_none_if_the_temperature_does_not_describe_the_sampling(engine: FakeEngine, is_managed: bool) -> None:
    group = await group_of(engine.url, {"temperature": 1.0, "top_p": 0.9}, is_managed=is_managed)
    assert not {"temperatures", "untrainable"} & set(group)


async def test_a_session_without_a_temperature_asks_for_one(engine: FakeEngine) -> None:
    assert (await group_of(engine.url, {}, is_managed=True))["temperatures"] == [1.0, 1.0]


async def test_a_gateway_tells_the_temperature_that_it_sampled_at(engine: FakeEngine) -> None:
    async with serve_gateway(LocalPool(), [engine.url]) as url:
        group = await group_of(f"{url}/unrecorded", {"temperature": 0.7})
    assert group["temperatures"] == [0.7, 0.7]


@pytest.mark.parametrize("is_managed", [False, True])
async def test_greedy_calls_tell_their_temperature_so_that_their_group_is_not_taken_for_sampled(
    engine: FakeEngine, is_managed: bool
) -> None:
    group = await group_of(engine.url, {"temperature": 0.0}, {"temperature": 0.0}, is_managed=is_managed)
    assert group["temperatures"] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("how", "call"),
    [({"of_ids": True}, {}), ({"is_managed": True}, {}), ({}, {"logprobs": True})],
    ids=["ids", "session", "chat"],
)
@pytest.mark.parametrize("is_raw", [False, True])
async def test_no_temperature_stands_beside_raw_logprobs(
    engine: FakeEngine, how: Any, call: dict[str, Any], is_raw: bool
) -> None:
    engine.logprobs_mode = RAW if is_raw else PROCESSED
    group = await group_of(engine.url, {"temperature": 0.7, **call}, **how)
    assert group.get("temperatures") == (None if is_raw else [0.7, 0.7])
