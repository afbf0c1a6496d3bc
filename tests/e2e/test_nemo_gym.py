"""NeMo Gym 0.7 as published with the pool as its transport: its conformance test, its capture and its builder.

Gym's servers are not run: they need Python 3.13.14.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stepwell.pool.actors import start_pool

from rig.docs_pages import DOCS, blocks
from rig.foreign.gym_package import importable_gym
from rig.local_pool import LocalPool
from stepwell.errors import BadRequest, Conflict
from stepwell.nemo_gym import RECORD, PoolLineage, PoolTokenSink, PoolTokenSource
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import EndResult
from stepwell.pool.client import DataPool, PoolClient
from stepwell.steps.step import Exactness

CHECKS = [
    *("put_then_freeze_visibility", "idempotent_reput", "conflicting_reput", "mark_incomplete_durability"),
    *("freeze_idempotency", "post_freeze_write_safety", "conditional_retirement", "lineage_visibility"),
    *("fresh_client_lineage_visibility", "begin_call_custody"),
]
QUESTION = [{"role": "user", "content": "2 + 2?"}]
ANSWER = {"role": "assistant", "content": "four"}
CONTINUED = [*QUESTION, ANSWER, {"role": "user", "content": "Sure?"}]


@pytest.fixture(scope="module", autouse=True)
def gym() -> Iterator[None]:
    with importable_gym():
        yield


@pytest.fixture
def pool() -> LocalPool:
    return LocalPool()


@pytest.fixture
def ray_pool(namespace: str, tmp_path: Path) -> dict[str, str]:
    """The names of a real pool of two shards with journals."""
    start_pool(PoolPlan(name="gym", shards=2, journal=str(tmp_path)), namespace)
    return {"pool": "gym", "namespace": namespace}


def reply(prompt: list[int], sampled: list[int], logprob: float = -0.5, text: str = "four") -> dict[str, Any]:
    tokens = {"prompt_token_ids": prompt, "generation_token_ids": sampled}
    message = {"role": "assistant", "content": text, **tokens, "generation_log_probs": [logprob] * len(sampled)}
    return {"id": f"chat-{text}", "model": "tiny", "choices": [{"message": message}]}


async def model_call(
    sink: PoolTokenSink,
    lineage: PoolLineage,
    rollout_id: str,
    call: str,
    messages: list[dict[str, Any]],
    answered: Callable[[], Awaitable[dict[str, Any] | None]],
) -> Any:
    """A call as Gym's model server makes it: what it continues, a note, the model, the record."""
    from nemo_gym.token_id_capture import sink as gym

    context = gym.CaptureContext(rollout_id, call, token_sink=sink, lineage_store=lineage)
    token = gym.set_token_sink(context)
    try:
        await gym.resolve_parent(messages)
        await gym.register_call_intent()
        if (response := await answered()) is not None:
            await gym.capture_tokens(response, messages)
    finally:
        gym.reset_token_sink(token)
    return context.parent_resolution


async def two_turns(rollout_id: str, group_size: int = 1, **where: Any) -> Any:
    """How Gym found the second call to continue the first."""
    sink, lineage = PoolTokenSink(group_size=group_size, temperature=0.7, **where), PoolLineage(**where)

    async def ask(call: str, messages: list[dict[str, Any]], response: dict[str, Any]) -> Any:
        return await model_call(sink, lineage, rollout_id, call, messages, partial(asyncio.sleep, 0, response))

    first = await ask("call-1", QUESTION, reply([1, 2], [3, 4]))
    assert first.status == "root"
    return await ask("call-2", CONTINUED, reply([1, 2, 3, 4, 5], [6], -0.1, "Yes."))


def entry(call: str = "call-1", **fields: Any) -> Any:
    from nemo_gym.token_id_capture.records import TokenEntry

    tokens = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    return TokenEntry(**{"rollout_id": "7-0", "model_call_id": call, **tokens, **fields})


async def conform(**where: Any) -> list[str]:
    from nemo_gym.token_id_capture.conformance import run_conformance

    makers = [partial(maker, **where) for maker in (PoolTokenSink, PoolTokenSource, PoolLineage)]
    return list(await run_conformance(*makers))


async def test_the_pool_conforms_as_a_transport(pool: LocalPool) -> None:
    assert await conform(pool=pool) == CHECKS


async def test_a_pool_of_shards_with_journals_conforms(ray_pool: dict[str, str]) -> None:
    assert await conform(**ray_pool, run="one") == CHECKS
    assert await conform(**ray_pool, run="two") == CHECKS, "runs do not meet"


async def test_the_conformance_test_finds_a_sink_that_forgets_what_was_lost(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_gym.token_id_capture.conformance import ConformanceError

    monkeypatch.setattr(PoolTokenSink, "mark_incomplete", lambda *_: asyncio.sleep(0))
    with pytest.raises(ConformanceError, match="mark_incomplete_durability"):
        await conform(pool=pool)


def test_the_classes_satisfy_the_protocols(pool: LocalPool) -> None:
    from nemo_gym.token_id_capture.protocols import LineageResolver, TokenSink, TokenSource

    assert isinstance(PoolTokenSink(pool=pool), TokenSink)
    assert isinstance(PoolTokenSource(pool=pool), TokenSource)
    assert isinstance(PoolLineage(pool=pool), LineageResolver)


async def test_a_rollout_that_gym_captures_is_trained_from_the_pool(pool: LocalPool) -> None:
    from nemo_gym.token_id_capture.consumer import trajectories_from_source

    source = PoolTokenSource(pool=pool)
    for rollout_id, reward in (("7-0", 1.0), ("7-1", 0.0)):
        found = await two_turns(rollout_id, group_size=2, pool=pool)
        assert (found.status, found.match.model_call_id) == ("resolved", "call-1")
        assert found.match.cumulative_token_ids == (1, 2, 3, 4)
        built = await trajectories_from_source(rollout_id, source)
        assert not built["mask_sample"], built
        assert [item["generation_token_ids"] for item in built["rebuilt_response"]["output"]] == [[3, 4], [6]]
        assert await source.complete(rollout_id, reward) is EndResult.COMPLETED
    steps = pool.taken()
    assert [step.trajectory_uid for step in steps] == ["7-0", "7-0", "7-1", "7-1"]
    assert {step.prompt_uid for step in steps} == {"7"}
    assert [step.trajectory_return for step in steps] == [1.0, 1.0, 0.0, 0.0]
    first, second = steps[:2]
    assert (first.prompt_ids.tolist(), first.response_ids.tolist()) == ([1, 2], [3, 4])
    assert (second.prompt_ids.tolist(), second.response_ids.tolist()) == ([1, 2, 3, 4, 5], [6])
    assert (second.exactness, second.model, second.uid) == (Exactness.SUBMITTED, "tiny", "call-2")
    assert second.temperature == 0.7
    assert second.response_logprobs is not None
    assert second.response_logprobs.tolist() == pytest.approx([-0.1])


async def test_a_step_has_the_policy_version_at_which_its_call_began(pool: LocalPool) -> None:
    async def answered() -> dict[str, Any]:
        await pool.set_policy_version(4)
        return reply([1, 2], [3, 4])

    await pool.set_policy_version(3)
    await model_call(PoolTokenSink(pool=pool), PoolLineage(pool=pool), "one", "call-1", QUESTION, answered)
    await PoolTokenSource(pool=pool).complete("one", 1.0)
    (step,) = pool.taken()
    assert (step.policy_version, step.extras["version"]) == (3, "unknown"), "the engine was not asked"


async def test_a_record_of_a_call_whose_begin_nobody_saw_is_not_labelled_with_the_newest_version(
    pool: LocalPool,
) -> None:
    """It was sampled before, by nobody knows which weights."""
    await pool.set_policy_version(3)
    await PoolTokenSink(pool=pool).put(entry())
    await PoolTokenSource(pool=pool).complete("7-0", 1.0)
    (step,) = pool.taken()
    assert (step.policy_version, step.extras["version"]) == (0, "unknown")


async def test_a_rollout_with_a_lost_call_is_aborted_and_its_place_is_free(pool: LocalPool) -> None:
    sink, lineage, source = PoolTokenSink(group_size=1, pool=pool), PoolLineage(pool=pool), PoolTokenSource(pool=pool)
    await two_turns("7-0", pool=pool)
    await model_call(sink, lineage, "7-0", "call-3", CONTINUED, partial(asyncio.sleep, 0, None))
    assert (await source.freeze("7-0")).incomplete
    assert await source.complete("7-0", 1.0) is EndResult.ABORTED
    await two_turns("7-0-a1", pool=pool)
    assert await source.complete("7-0-a1", 1.0) is EndResult.COMPLETED
    assert {step.trajectory_uid for step in pool.taken()} == {"7-0-a1"}


async def test_a_call_that_is_lost_after_the_end_takes_the_rollout_out_of_the_pool(pool: LocalPool) -> None:
    await two_turns("7-0", pool=pool)
    assert await PoolTokenSource(pool=pool).complete("7-0", 1.0) is EndResult.COMPLETED
    await PoolTokenSink(group_size=1, pool=pool).mark_incomplete("7-0", "call-3")
    assert pool.rules.state.trajectories == {}


async def test_a_dropped_rollout_is_not_trained(pool: LocalPool) -> None:
    source = PoolTokenSource(pool=pool)
    await two_turns("7-0", pool=pool)
    seen = await source.freeze("7-0")
    assert await source.drop("7-0", snapshot_id=seen.snapshot_id, version=seen.version)
    assert not await source.drop("7-0", snapshot_id=seen.snapshot_id, version=seen.version)
    assert await source.complete("7-0", 1.0) is EndResult.LATE


async def test_a_record_that_was_put_keeps_every_field(pool: LocalPool) -> None:
    exact, inexact = [-0.5, -0.25], [-0.1, -1e-9]
    sink, source = PoolTokenSink(pool=pool, run="r"), PoolTokenSource(pool=pool, run="r")
    more = {"routed_experts": [[1, 2]], "of_a_later_release": {"a": [1.5, None]}, "created_at": 1700000000.123}
    records = [
        entry(str(number), generation_token_ids=[5, 6], generation_log_probs=logprobs, **more)
        for number, logprobs in enumerate((exact, inexact))
    ]
    for record in records:
        await sink.put(record)
    assert list((await source.freeze("7-0")).entries) == records
    stored = [step.carried for step in pool.rules.state.trajectories["r.7-0"].steps.values()]
    kept = ["generation_log_probs" in value[RECORD] for one in stored for value in one if RECORD in (value or ())]
    assert kept == [False, True], "only what 32 bits cannot hold is stored twice"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"generation_token_ids": [], "generation_log_probs": []}, "no_response_ids"),
        ({"generation_log_probs": [0.5]}, "bad_logprob"),
        ({"prompt_is_delta": True, "parent_call_id": "call-0", "parent_resolution": "resolved"}, "delta_records"),
    ],
)
async def test_a_record_that_cannot_be_trained_is_refused(pool: LocalPool, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        await PoolTokenSink(pool=pool).put(entry(**fields))


async def test_another_record_of_the_same_call_is_a_conflict(pool: LocalPool) -> None:
    sink = PoolTokenSink(pool=pool)
    await sink.put(entry())
    with pytest.raises(Conflict, match="another record"):
        await sink.put(entry(created_at=1.0))


async def test_a_call_of_a_rollout_that_is_over_is_refused(pool: LocalPool) -> None:
    await two_turns("7-0", pool=pool)
    seen = await PoolTokenSource(pool=pool).freeze("7-0")
    await PoolTokenSource(pool=pool).drop("7-0", snapshot_id=seen.snapshot_id, version=seen.version)
    with pytest.raises(Conflict):
        await PoolTokenSink(group_size=1, pool=pool).put(entry("call-4"))


async def test_the_page_hands_the_rollouts_of_a_file_over(
    ray_pool: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = [block.code for block in blocks(DOCS / "environments.md", "python") if "PoolTokenSource" in block.code]
    records = []
    for rollout, reward in enumerate((1.0, 0.0)):
        await two_turns(f"3-{rollout}", group_size=2, run="run-1", **ray_pool)
        records.append({"_ng_task_index": 3, "_ng_rollout_index": rollout, "reward": reward})
    (tmp_path / "rollouts.jsonl").write_text("\n".join(map(json.dumps, records)))
    monkeypatch.chdir(tmp_path)
    ours = block.replace('pool="data_pool"', f'pool="gym", namespace="{ray_pool["namespace"]}"')
    await asyncio.to_thread(exec, ours, {})
    batch = DataPool(PoolClient("gym", ray_pool["namespace"])).fetch_batch(1, timeout=10)
    assert sorted(batch.returns_T.tolist()) == [0.0, 1.0]
