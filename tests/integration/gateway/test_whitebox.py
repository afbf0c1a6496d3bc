"""A white-box agent's calls, over real HTTP."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import pytest

from rig.fake_engine import FakeEngine, Faults
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from stepwell.errors import NotReady, RewardFailed
from stepwell.pool.api.scoring import RewardRequest, RewardScore
from stepwell.wire.gateway_api import MAX_SUBMITTED_STEPS

STEP: dict[str, Any] = {
    "prompt_ids": [1, 2],
    "response_ids": [3, 4],
    "trajectory_uid": "t",
    "prompt_uid": "p",
    "step_index": 0,
}


class SpellingTokenizer:
    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


class LengthReward:
    """Scores by the length of the response; fails when told to."""

    failure: Exception | None = None
    seen: RewardRequest | None = None

    async def compute_reward(self, request: RewardRequest) -> RewardScore:
        if self.failure:
            raise self.failure
        self.seen = request
        return RewardScore(float(len(request.response_ids)), {"by": "length"})

    async def check(self) -> None:
        if self.failure:
            raise self.failure


@pytest.fixture
def rewards() -> LengthReward:
    return LengthReward()


@pytest.fixture
async def http(pool: LocalPool, engine: FakeEngine, rewards: LengthReward) -> AsyncIterator[aiohttp.ClientSession]:
    gateway = serve_gateway(pool, [engine.url], rewards=rewards, load_tokenizer=lambda _: SpellingTokenizer())
    async with gateway as url, aiohttp.ClientSession(url) as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    async with http.post(path, json=body) as answer:
        return answer.status, await answer.json()


async def ready(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(60):
        while (await http.get("/ready")).status != 200:
            await asyncio.sleep(0.01)


async def test_generate_gives_ids_logprobs_and_who_wrote_them(
    http: aiohttp.ClientSession, engine: FakeEngine, pool: LocalPool
) -> None:
    engine.weight_version = "6"
    engine.faults = Faults(version_change_at_token=3, new_version="7")
    wanted = {"prompt_ids": [5, 6, 7], "sampling_params": {"max_tokens": 5, "seed": 1}}
    status, answer = await post(http, "/generate", wanted)
    assert status == 200
    assert len(answer["token_ids"]) == len(answer["log_probs"]) == 5
    assert answer["stop_reason"] == "length"
    assert answer["version_spans"] == [[6, 0, 3], [7, 3, 5]]
    assert answer["policy_version"] == 6


async def test_generate_names_version_0_while_no_one_has_named_another(http: aiohttp.ClientSession) -> None:
    _, answer = await post(http, "/generate", {"prompt_ids": [5]})
    assert (answer["policy_version"], answer["version_spans"]) == (0, [])


async def test_generate_keeps_to_the_lengths_a_trainer_takes(http: aiohttp.ClientSession, engine: FakeEngine) -> None:
    await post(http, "/generate", {"prompt_ids": [5], "sampling_params": {"max_tokens": 5000}})
    assert engine.requests[-1].body["sampling_params"]["max_tokens"] == 64
    status, answer = await post(http, "/generate", {"prompt_ids": list(range(2049))})
    assert (status, answer["error"]["message"]) == (400, "2049 prompt tokens are more than --prompt-length 2048")


@pytest.mark.parametrize("faults", [Faults(drop_ids=True), Faults(logprob_value=-9999.0), Faults(wrong_usage=True)])
async def test_generate_hands_out_nothing_that_cannot_be_trained(
    http: aiohttp.ClientSession, engine: FakeEngine, faults: Faults
) -> None:
    engine.faults = faults
    status, answer = await post(http, "/generate", {"prompt_ids": [5]})
    assert status == 502
    assert "cannot be trained on" in answer["error"]["message"]


async def test_an_engines_refusal_to_generate_is_passed_on(http: aiohttp.ClientSession, engine: FakeEngine) -> None:
    engine.faults = Faults(error_status=400)
    status, answer = await post(http, "/generate", {"prompt_ids": [5]})
    assert status == 400
    assert answer["error"]["message"]


async def generated_step(http: aiohttp.ClientSession, **params: Any) -> dict[str, Any]:
    """A step of what was generated, which tells no more than its tokens."""
    wanted = {"prompt_ids": [5, 6], "sampling_params": {"max_tokens": 4, "seed": 1, **params}}
    _, answer = await post(http, "/generate", wanted)
    return STEP | {"prompt_ids": [5, 6], "response_ids": answer["token_ids"]}


async def test_a_step_that_tells_no_temperature_has_that_with_which_it_was_generated(
    http: aiohttp.ClientSession, pool: LocalPool
) -> None:
    step = await generated_step(http, temperature=0.7)
    told = step | {"step_index": 1, "sampling": {"temperature": 0.5}}
    other = step | {"step_index": 2, "response_ids": [1, 2]}
    status, _ = await post(http, "/submit_steps", {"steps": [step, told, other | {"is_last": True}]})
    assert status == 200
    assert [taken.temperature for taken in pool.taken("train")] == [0.7, 0.5, None]


async def test_what_was_generated_by_truncated_sampling_is_not_trained(
    http: aiohttp.ClientSession, pool: LocalPool
) -> None:
    step = await generated_step(http, temperature=0.7, top_p=0.9)
    await post(http, "/submit_steps", {"steps": [step | {"is_last": True}]})
    (taken,) = pool.taken("train")
    assert (taken.untrainable or "").startswith("truncated: ")


async def test_submitted_steps_come_out_as_they_went_in(http: aiohttp.ClientSession, pool: LocalPool) -> None:
    given = {
        "reward": 0.5,
        "policy_version": 9,
        "is_last": True,
        "metadata": {"a": [1, {"b": None}]},
        "response_logprobs": [-0.5, -1.0],
        "response_mask": [False, True],
        "version_spans": [[8, 0, 1], [9, 1, 2]],
        "finish_reason": "stop",
        "sampling": {"temperature": 1.0},
        "extras": {"x": "y"},
    }
    status, answer = await post(http, "/submit_steps?channel=validation", {"steps": [STEP | given]})
    assert (status, answer) == (200, {"accepted": 1, "refused": {}})
    (step,) = pool.taken("validation")
    assert step.prompt_ids.tolist() == [1, 2]
    assert step.response_ids.tolist() == [3, 4]
    assert step.response_logprobs is not None
    assert step.response_mask is not None
    got = {name: getattr(step, name) for name in given}
    got["response_logprobs"] = step.response_logprobs.tolist()
    got["response_mask"] = step.response_mask.tolist()
    got["version_spans"] = [list(span) for span in step.version_spans]
    assert got == given


async def test_submitted_groups_fill_up_over_several_requests(http: aiohttp.ClientSession, pool: LocalPool) -> None:
    for uid in ("a", "b"):
        assert pool.rules.take(1) is None
        step = STEP | {"trajectory_uid": uid, "is_last": True}
        await post(http, "/submit_steps?group_size=2", {"steps": [step]})
    assert [step.trajectory_uid for step in pool.taken()] == ["a", "b"]


async def test_refused_steps_are_counted_by_cause(http: aiohttp.ClientSession) -> None:
    _, answer = await post(http, "/submit_steps", {"steps": [STEP, STEP]})
    assert answer == {"accepted": 1, "refused": {"duplicate": 1}}


async def test_more_steps_than_a_request_may_have_are_refused_and_none_is_taken(
    http: aiohttp.ClientSession, pool: LocalPool
) -> None:
    status, answer = await post(http, "/submit_steps", {"steps": [STEP] * (MAX_SUBMITTED_STEPS + 1)})
    assert status == 400
    assert "at most 4096 items" in answer["error"]["message"]
    assert pool.rules.stats().submitted == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"response_ids": []}, "steps.0: no_response_ids"),
        ({"response_logprobs": [-1.0]}, "steps.0: logprob_count"),
        ({"response_logprobs": [-1.0, -9999.0]}, "steps.0: bad_logprob"),
        ({"prompt_ids": [-1]}, "steps.0.prompt_ids.0 must be at least 0"),
        ({"step_index": -1}, "steps.0.step_index must be at least 0"),
        ({"prompt_uid": ".."}, "steps.0.prompt_uid: "),
    ],
)
async def test_an_unsound_submitted_step_is_refused_with_the_reason(
    http: aiohttp.ClientSession, pool: LocalPool, change: dict[str, Any], why: str
) -> None:
    status, answer = await post(http, "/submit_steps", {"steps": [STEP | change]})
    assert status == 400
    assert why in answer["error"]["message"]
    assert pool.rules.stats().submitted == 0


async def test_a_reward_is_computed_from_ids_texts_and_fields(
    http: aiohttp.ClientSession, rewards: LengthReward
) -> None:
    await ready(http)
    wanted = {"prompt_ids": [0], "response_ids": [1, 2], "num_turns": 3, "dataset_fields": {"answer": "bc"}}
    status, answer = await post(http, "/compute_reward", wanted)
    assert (status, answer) == (200, {"reward_score": 2.0, "reward_extra_info": {"by": "length"}})
    assert rewards.seen is not None
    assert (rewards.seen.prompt_text, rewards.seen.response_text, rewards.seen.num_turns) == ("a", "bc", 3)
    assert rewards.seen.dataset_fields == {"answer": "bc"}


@pytest.mark.parametrize(("failure", "status"), [(RewardFailed("it crashed"), 502), (NotReady("no worker"), 503)])
async def test_a_failed_reward_is_an_error_never_a_zero(
    http: aiohttp.ClientSession, rewards: LengthReward, failure: Exception, status: int
) -> None:
    await ready(http)
    rewards.failure = failure
    got, answer = await post(http, "/compute_reward", {"prompt_ids": [0], "response_ids": [1]})
    assert (got, answer["error"]["message"]) == (status, str(failure))
    assert "reward_score" not in answer


async def test_without_a_reward_worker_the_flag_is_named(pool: LocalPool, engine: FakeEngine) -> None:
    async with serve_gateway(pool, [engine.url]) as url, aiohttp.ClientSession(url) as http:
        status, answer = await post(http, "/compute_reward", {"prompt_ids": [0], "response_ids": [1]})
    assert status == 503
    assert "--reward-worker-name" in answer["error"]["message"]
