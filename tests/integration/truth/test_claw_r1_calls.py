"""M2: calls that are written for Claw-R1 get the answers that they expect, and differ only where the page says so.

The bodies are those that Claw-R1's own agent flows send. `test_differs_…` asserts a row of the table in
docs/coming-from-claw-r1.md.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from openai import AsyncOpenAI
from stepwell.gateway.dialects.request_rules import RequestRules

from rig.fake_engine import FakeEngine, Reply, ToolCall
from rig.gateways import serve_gateway
from rig.issued_keys import CONTROL, bearer
from rig.local_pool import LocalPool
from stepwell.access.caller import Role
from stepwell.access.key_file import KeyFile, create_key
from stepwell.commands.gateway import GatewaySettings, run_gateway
from stepwell.errors import BadRequest
from stepwell.pool.api.scoring import RewardRequest, RewardScore
from stepwell.steps.step import Step, VersionSpan

STEP: dict[str, Any] = {
    "prompt_ids": [1, 2, 3],
    "response_ids": [4, 5],
    "reward": None,
    "rollout_log_probs": [-0.5, -1.25],
    "trajectory_uid": "5f0c6e6d0f5a4d0f8d6b6f1f3c1f6a77",
    "prompt_uid": "17",
    "step_index": 0,
    "policy_version": 3,
    "is_last": True,
    "metadata": {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "72"}},
}
"""What gateway_submit_steps sends for one step."""
WHOLE_PAYLOAD = STEP | {"multi_modal_data": None, "routed_experts": None, "metadata": None}
"""Every field of StepPayload, with the nulls of its defaults."""
LONG = {"max_tokens": 256}
METADATA: dict[str, Any] = {"reward_model": {"ground_truth": "72"}}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


class SpellingTokenizer:
    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


class GivenReward:
    seen: RewardRequest | None = None

    async def compute_reward(self, request: RewardRequest) -> RewardScore:
        self.seen = request
        return RewardScore(0.75, {"acc": True})

    async def check(self) -> None: ...


@pytest.fixture
def rewards() -> GivenReward:
    return GivenReward()


@pytest.fixture
async def http(pool: LocalPool, engine: FakeEngine, rewards: GivenReward) -> AsyncIterator[aiohttp.ClientSession]:
    gateway = serve_gateway(pool, [engine.url], rewards=rewards, load_tokenizer=lambda _: SpellingTokenizer())
    async with gateway as url, aiohttp.ClientSession(url) as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    async with http.post(path, json=body) if body is not None else http.post(path) as answer:
        return answer.status, await answer.json()


async def opened(http: aiohttp.ClientSession, **wanted: Any) -> str:
    """The path of a new trajectory's base_url, without its /v1."""
    status, answer = await post(http, "/init_trajectory", wanted or None)
    assert status == 200
    return f"/{answer['trajectory_uid']}/{answer['prompt_uid']}"


async def ready(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(60):
        while (await http.get("/ready")).status != 200:
            await asyncio.sleep(0.01)


def trained(pool: LocalPool) -> list[Step]:
    """The steps that a trainer gets by default."""
    groups = pool.rules.take(1)
    assert groups is not None
    return groups[0]


@pytest.mark.parametrize("payload", [STEP, WHOLE_PAYLOAD], ids=["as its flows send it", "every field"])
async def test_submit_steps_takes_its_payload(
    http: aiohttp.ClientSession, pool: LocalPool, payload: dict[str, Any]
) -> None:
    status, answer = await post(http, "/submit_steps?channel=train", {"steps": [payload]})
    assert (status, answer["accepted"]) == (200, 1)
    (step,) = trained(pool)
    assert step.response_logprobs is not None
    assert step.response_logprobs.tolist() == [-0.5, -1.25]
    assert (step.prompt_uid, step.policy_version, step.metadata) == ("17", 3, payload["metadata"] or {})
    assert step.reward is None


async def test_submit_steps_without_log_probs_takes_its_payload(http: aiohttp.ClientSession, pool: LocalPool) -> None:
    _, answer = await post(http, "/submit_steps", {"steps": [STEP | {"rollout_log_probs": None, "reward": 1.0}]})
    assert answer["accepted"] == 1
    (step,) = pool.taken()
    assert (step.response_logprobs, step.reward) == (None, 1.0)


async def test_generate_takes_its_payload(http: aiohttp.ClientSession) -> None:
    sampling = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "logprobs": True, "max_tokens": 5}
    body = {"prompt_ids": [5, 6, 7], "sampling_params": sampling, "image_data": None, "video_data": None}
    status, answer = await post(http, "/generate", body)
    assert status == 200, answer
    assert len(answer["token_ids"]) == len(answer["log_probs"]) == 5
    assert answer["stop_reason"] == "length"


async def test_compute_reward_takes_its_payload(http: aiohttp.ClientSession, rewards: GivenReward) -> None:
    await ready(http)
    body = {
        "prompt_ids": [0],
        "response_ids": [1, 2],
        "multi_modal_data": None,
        "num_turns": 2,
        "extra_fields": {},
        "dataset_fields": {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "72"}},
    }
    assert await post(http, "/compute_reward", body) == (
        200,
        {"reward_score": 0.75, "reward_extra_info": {"acc": True}},
    )
    assert rewards.seen is not None
    assert rewards.seen.num_turns == 2


async def test_a_black_box_flow_makes_its_four_calls(http: aiohttp.ClientSession, pool: LocalPool) -> None:
    """As BlackBoxAgentFlow does: init, register, chat, complete, each under {base_url}/v1."""
    path = await opened(http)
    metadata = {"reward_model": {"ground_truth": "72"}, "uid": 17}
    assert await post(http, f"{path}/v1/register_trajectory", {"channel": "train", "metadata": metadata}) == (
        200,
        {"status": "ok"},
    )
    for _ in range(2):
        status, answer = await post(http, f"{path}/v1/chat/completions", CHAT)
        assert (status, answer["object"]) == (200, "chat.completion")
    status, _ = await post(http, f"{path}/v1/complete_trajectory", {"reward": 1.0, "channel": "train"})
    assert status == 200
    steps = trained(pool)
    assert [(step.step_index, step.is_last) for step in steps] == [(0, False), (1, True)]
    assert all(step.metadata == metadata for step in steps)


@pytest.mark.parametrize("body", [None, {}, {"channel": None, "metadata": None}], ids=["no body", "empty", "nulls"])
async def test_register_and_complete_take_no_body_and_nulls(http: aiohttp.ClientSession, body: Any) -> None:
    path = await opened(http)
    assert await post(http, f"{path}/v1/register_trajectory", body) == (200, {"status": "ok"})
    await post(http, f"{path}/v1/chat/completions", CHAT)
    status, _ = await post(http, f"{path}/v1/complete_trajectory", body and {"reward": None})
    assert status == 200


async def test_the_model_default_is_the_one_that_the_engine_serves(
    http: aiohttp.ClientSession, pool: LocalPool
) -> None:
    path = await opened(http)
    status, answer = await post(http, f"{path}/v1/chat/completions", {**CHAT, "model": "default"})
    assert (status, answer["model"]) == (200, "tiny")
    await post(http, f"{path}/v1/complete_trajectory", {"reward": 1.0})
    assert [step.model for step in pool.taken()] == ["tiny"]


# -- the table of differences ----------------------------------------------------------------------------------------


async def test_differs_a_completed_trajectory_says_what_became_of_it(http: aiohttp.ClientSession) -> None:
    path, empty = await opened(http), await opened(http)
    await post(http, f"{path}/v1/chat/completions", CHAT)
    assert await post(http, f"{path}/v1/complete_trajectory", {}) == (200, {"status": "completed"})
    assert await post(http, f"{empty}/v1/complete_trajectory", {}) == (200, {"status": "empty"})


async def test_differs_a_trajectory_that_was_not_opened_is_404(http: aiohttp.ClientSession, pool: LocalPool) -> None:
    for call, body in (("chat/completions", CHAT), ("complete_trajectory", {"reward": 1.0})):
        status, answer = await post(http, f"/never-opened/1/v1/{call}", body)
        assert (status, answer["error"]["code"]) == (404, "unknown_trajectory")
    assert pool.rules.stats().submitted == 0


async def test_differs_each_trajectory_is_a_group_by_itself(http: aiohttp.ClientSession) -> None:
    first, second = await opened(http), await opened(http)
    assert first.rpartition("/")[2] != second.rpartition("/")[2]
    assert (await opened(http, prompt_uid="17")).endswith("/17")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rollout_log_probs": [-0.5]}, "logprob_count"),
        ({"response_ids": []}, "no_response_ids"),
        ({"trajectory_uid": ""}, "trajectory_uid"),
        ({"rollout_logprobs": [-0.5, -1.0]}, "rollout_logprobs"),
    ],
    ids=["misaligned", "no response", "no name", "unknown field"],
)
async def test_differs_an_unsound_step_is_refused_with_the_reason(
    http: aiohttp.ClientSession, pool: LocalPool, change: dict[str, Any], why: str
) -> None:
    status, answer = await post(http, "/submit_steps", {"steps": [STEP | change]})
    assert status == 400
    assert why in answer["error"]["message"]
    assert pool.rules.stats().submitted == 0


async def test_differs_a_step_is_accepted_once(http: aiohttp.ClientSession) -> None:
    _, answer = await post(http, "/submit_steps", {"steps": [STEP, STEP]})
    assert answer == {"accepted": 1, "refused": {"duplicate": 1}}


async def test_differs_a_step_with_images_is_not_trained(http: aiohttp.ClientSession, pool: LocalPool) -> None:
    steps = [STEP | {"multi_modal_data": {"images": ["…"]}, "is_last": False}, STEP | {"step_index": 1}]
    assert (await post(http, "/submit_steps", {"steps": steps}))[1]["accepted"] == 2
    assert [step.step_index for step in trained(pool)] == [1]
    status, answer = await post(http, "/generate", {"prompt_ids": [1], "image_data": ["…"]})
    assert (status, "image_data" in answer["error"]["message"]) == (400, True)


async def test_differs_a_greedy_response_is_kept_and_not_trained(http: aiohttp.ClientSession, pool: LocalPool) -> None:
    path = await opened(http)
    await post(http, f"{path}/v1/chat/completions", {**CHAT, "temperature": 0.0})
    await post(http, f"{path}/v1/chat/completions", CHAT)
    await post(http, f"{path}/v1/complete_trajectory", {"reward": 1.0})
    assert [step.step_index for step in trained(pool)] == [1]


async def test_differs_a_prompt_that_is_too_long_is_refused_instead_of_cut(pool: LocalPool, engine: FakeEngine) -> None:
    async with serve_gateway(pool, [engine.url], prompt_length=4) as url, aiohttp.ClientSession(url) as http:
        status, answer = await post(http, "/generate", {"prompt_ids": [1, 2, 3, 4, 5]})
        assert (status, "--prompt-length" in answer["error"]["message"]) == (400, True)


async def register_as(http: aiohttp.ClientSession, path: str, prompt_uid: str, body: Any = None) -> tuple[int, str]:
    """As Claw-R1's flow does: it replaces the prompt_uid in the base_url that it got. The status and the new path."""
    renamed = f"{path.rpartition('/')[0]}/{prompt_uid}"
    return (await post(http, f"{renamed}/v1/register_trajectory", body))[0], renamed


async def test_a_trajectory_without_calls_joins_the_group_that_its_flow_registers(engine: FakeEngine) -> None:
    pool = LocalPool(group_size=2)
    async with serve_gateway(pool, [engine.url]) as url, aiohttp.ClientSession(url) as http:
        for prompt_uid in ("17", "18", "18", "17"):
            status, path = await register_as(http, await opened(http), prompt_uid, {"metadata": {"uid": prompt_uid}})
            assert status == 200
            assert (await post(http, f"{path}/v1/chat/completions", CHAT))[0] == 200
            assert await post(http, f"{path}/v1/complete_trajectory", {"reward": 1.0}) == (200, {"status": "completed"})
    for prompt_uid in ("17", "18"):
        steps = pool.taken()
        assert [(step.prompt_uid, step.metadata) for step in steps] == [(prompt_uid, {"uid": prompt_uid})] * 2


@pytest.mark.parametrize("has_keys", [False, True], ids=["without keys", "with the key in the URL"])
async def test_the_calls_of_its_black_box_flow_make_its_groups(engine: FakeEngine, has_keys: bool) -> None:
    """The paths, the order and the bodies of BlackBoxAgentFlowBase and its GSM8K agent, which send no header of a key.

    The flow cuts two parts from the base_url, for a prompt_uid and /v1, and puts its own prompt_uid there.
    """
    pool = LocalPool(group_size=2)
    gateway = serve_gateway(pool, [engine.url], control_keys=[CONTROL] if has_keys else [])
    async with gateway as url, httpx.AsyncClient(timeout=60) as client:
        root = url.replace("://", f"://:{CONTROL}@") if has_keys else url
        for uid, channel in ((17, "train"), (18, "val"), (18, "val"), (17, "train")):
            opened = await client.post(f"{root}/init_trajectory")
            base_url = f"{opened.json()['base_url'].rsplit('/', 2)[0]}/{uid}/v1"
            said = {"channel": channel, "metadata": {"uid": uid, **METADATA}}
            told = [await client.post(f"{base_url}/register_trajectory", json=said)]
            async with AsyncOpenAI(base_url=base_url, api_key="not-needed", max_retries=0) as agent:
                await agent.chat.completions.create(model="default", messages=CHAT["messages"])
            told.append(await client.post(f"{base_url}/complete_trajectory"))
            assert [answer.json()["status"] for answer in told] == ["ok", "completed"]
    for uid, channel in ((17, "train"), (18, "val")):
        steps = pool.taken(channel)
        assert [(step.prompt_uid, step.step_index, step.is_last) for step in steps] == [(str(uid), 0, True)] * 2
        assert len({step.trajectory_uid for step in steps}) == 2
        assert all(step.metadata == {"uid": uid, **METADATA} for step in steps)


async def test_differs_a_flow_without_a_key_is_refused_where_there_are_keys(
    pool: LocalPool, engine: FakeEngine
) -> None:
    async with serve_gateway(pool, [engine.url], control_keys=[CONTROL]) as url, httpx.AsyncClient() as client:
        assert (await client.post(f"{url}/init_trajectory")).status_code == 401
        assert (await client.post(f"{url}/generate", json={"prompt_ids": [1]})).status_code == 401
        opened = await client.post(f"{url.replace('://', f'://:{CONTROL}@')}/init_trajectory")
        assert opened.status_code == 200
        assert CONTROL not in opened.text  # its base_url has a key for this trajectory alone


@pytest.mark.parametrize("spelling", ["/abc123/1", "/abc123/1/", "/abc123/1/v1", "/abc123/1/v1/v1"])
async def test_the_base_url_of_its_documentation_works_as_it_is_written(
    http: aiohttp.ClientSession, pool: LocalPool, spelling: str
) -> None:
    await opened(http, trajectory_uid="abc123", prompt_uid="1")
    async with AsyncOpenAI(base_url=f"{http._base_url}".rstrip("/") + spelling, api_key="not-needed") as agent:
        await agent.chat.completions.create(model="tiny", messages=CHAT["messages"])
    await post(http, "/abc123/1/v1/complete_trajectory")
    assert [step.trajectory_uid for step in pool.taken()] == ["abc123"]


async def test_differs_tool_calls_are_parsed_unless_the_operator_wants_text(
    pool: LocalPool, engine: FakeEngine
) -> None:
    """They look for <tool_call> in the content; its gateway parses nothing."""
    tool = {"type": "function", "function": {"name": "check_answer", "parameters": {"type": "object"}}}
    engine.replies += [Reply("", (ToolCall("check_answer", {"answer": "72"}),))] * 2
    for as_text in (True, False):
        rules = RequestRules(calls_as_text=as_text)
        async with serve_gateway(pool, [engine.url], rules=rules) as url, aiohttp.ClientSession(url) as http:
            _, answer = await post(http, f"{await opened(http)}/v1/chat/completions", {**CHAT, "tools": [tool]} | LONG)
        message = answer["choices"][0]["message"]
        assert ("<tool_call>" in (message["content"] or "")) is as_text
        assert bool(message.get("tool_calls")) is not as_text


async def test_a_step_of_a_generation_is_trained_as_it_was_sampled(
    http: aiohttp.ClientSession, pool: LocalPool, engine: FakeEngine
) -> None:
    """Its white-box flows submit tokens and log-probabilities only, and the version at the rollout's beginning."""
    engine.weight_version = "9"
    _, done = await post(http, "/generate", {"prompt_ids": [5, 6], "sampling_params": {"temperature": 0.7}})
    step = STEP | {
        "prompt_ids": [5, 6],
        "response_ids": done["token_ids"],
        "rollout_log_probs": done["log_probs"],
        "is_last": False,
    }
    other = STEP | {"step_index": 1}
    assert (await post(http, "/submit_steps", {"steps": [step, other]}))[1]["accepted"] == 2
    made, unknown = pool.taken()
    assert (made.temperature, made.policy_version, made.model) == (0.7, 9, "tiny")
    assert made.version_spans == tuple(VersionSpan(*span) for span in done["version_spans"])
    assert (unknown.temperature, unknown.policy_version) == (None, 3)


async def test_a_trajectory_joins_a_group_of_another_shard(engine: FakeEngine) -> None:
    pool = LocalPool(shards=3)
    async with serve_gateway(pool, [engine.url]) as url, aiohttp.ClientSession(url) as http:
        for number in range(9):
            path = await opened(http, channel="val", metadata={"level": "hard"})
            status, renamed = await register_as(http, path, f"prompt-{number}")
            assert status == 200
            _, trajectory_uid, former = path.split("/")
            assert await pool.channel_if_open(trajectory_uid, former) is None
            assert await pool.channel_if_open(trajectory_uid, f"prompt-{number}") == "val"
            await post(http, f"{renamed}/v1/chat/completions", CHAT)
            assert await post(http, f"{renamed}/v1/complete_trajectory", {}) == (200, {"status": "completed"})
    shards = [service.pool for service in pool.transport.services.values()]
    found = [one for shard in shards for one in shard.state.trajectories.values()]
    assert [one.metadata for one in found] == [{"level": "hard"}] * 9
    assert len({id(shard) for shard in shards if shard.state.trajectories}) > 1


async def test_differs_a_prompt_uid_is_named_before_the_first_call(
    http: aiohttp.ClientSession, pool: LocalPool
) -> None:
    path = await opened(http)
    await post(http, f"{path}/v1/chat/completions", CHAT)
    status, _ = await register_as(http, path, "17")
    assert status == 409
    assert (await register_as(http, await opened(http, prompt_uid="16"), "17"))[0] == 404
    await post(http, f"{path}/v1/complete_trajectory", {"reward": 1.0})
    assert [step.prompt_uid for step in pool.taken()] == [path.rpartition("/")[2]]


async def test_a_key_regroups_trajectories_of_its_own_channel_only(
    pool: LocalPool, engine: FakeEngine, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    runner, _ = create_key(keys, Role.RUNNER, channels=("mine",))
    gateway = serve_gateway(pool, [engine.url], control_keys=[CONTROL], issued=KeyFile(keys, interval=0.0))
    async with gateway as url, aiohttp.ClientSession(url, headers=bearer(CONTROL)) as http:
        mine, other = await opened(http, channel="mine"), await opened(http, channel="other")
        for path, expected in ((mine, 200), (other, 403)):
            renamed = f"{path.rpartition('/')[0]}/17/v1/register_trajectory"
            async with http.post(renamed, headers=bearer(runner)) as answer:
                assert answer.status == expected
    assert await pool.channel_if_open(other.split("/")[1], "17") is None


async def test_differs_register_trajectory_opens_nothing(http: aiohttp.ClientSession, pool: LocalPool) -> None:
    for call in ("register_trajectory", "complete_trajectory"):
        status, answer = await post(http, f"/never-opened/1/v1/{call}", {"channel": "train"})
        assert (status, answer["error"]["code"]) == (404, "unknown_trajectory")
        assert "POST /init_trajectory" in answer["error"]["message"]
    assert not pool.rules.state.trajectories


@pytest.mark.parametrize("uid", ["v1", "session", "unrecorded"])
@pytest.mark.parametrize("field", ["trajectory_uid", "prompt_uid"])
async def test_differs_a_part_of_urls_is_no_uid(
    http: aiohttp.ClientSession, pool: LocalPool, uid: str, field: str
) -> None:
    for path, body in (("/init_trajectory", {field: uid}), ("/submit_steps", {"steps": [STEP | {field: uid}]})):
        status, answer = await post(http, path, body)
        assert (status, f"'{uid}' is no uid" in answer["error"]["message"]) == (400, True), answer
    assert not pool.rules.state.trajectories


@pytest.mark.parametrize("call", ["register_trajectory", "chat/completions", "complete_trajectory", "feedback"])
async def test_differs_a_url_without_a_uid_is_refused(http: aiohttp.ClientSession, pool: LocalPool, call: str) -> None:
    """What a flow makes that cuts off too much of a base_url."""
    body = {"chat/completions": CHAT, "feedback": {"value": 1.0}}.get(call, {})
    status, answer = await post(http, f"/17/v1/{call}", body)
    assert (status, "/TRAJECTORY_UID/PROMPT_UID" in answer["error"]["message"]) == (400, True), answer
    assert not pool.rules.state.trajectories


async def test_differs_a_call_after_the_completion_is_refused(http: aiohttp.ClientSession, pool: LocalPool) -> None:
    path = await opened(http)
    await post(http, f"{path}/v1/chat/completions", CHAT)
    await post(http, f"{path}/v1/complete_trajectory", {"reward": 1.0})
    status, answer = await post(http, f"{path}/v1/chat/completions", CHAT)
    assert (status, answer["error"]["code"]) == (404, "unknown_trajectory")
    assert [step.reward for step in pool.taken()] == [1.0]


@pytest.mark.parametrize("told", [{"temperature": 0.7}, {"sampling": {"temperature": 0.7}}], ids=["field", "sampling"])
async def test_differs_a_submitted_step_tells_its_temperature(
    http: aiohttp.ClientSession, pool: LocalPool, told: dict[str, Any]
) -> None:
    steps = [STEP | {"is_last": False}, STEP | {"step_index": 1} | told]
    assert (await post(http, "/submit_steps", {"steps": steps}))[1]["accepted"] == 2
    assert [step.temperature for step in pool.taken()] == [None, 0.7]


async def test_differs_a_body_says_that_it_is_json(http: aiohttp.ClientSession, pool: LocalPool) -> None:
    async with http.post("/init_trajectory", data="{}", headers={"Content-Type": "text/plain"}) as answer:
        assert answer.status == 415
        assert "Content-Type: application/json" in (await answer.json())["error"]["message"]
    async with http.post("/init_trajectory", json={}) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    ("where", "status"), [({"Origin": "https://evil.example"}, 403), ({"Host": "evil.example"}, 421)]
)
async def test_differs_a_page_of_another_site_is_refused(
    http: aiohttp.ClientSession, where: dict[str, str], status: int
) -> None:
    async with http.post("/init_trajectory", json={}, headers=where) as answer:
        assert answer.status == status


def test_differs_without_keys_it_listens_on_loopback() -> None:
    flags = {
        "data_pool_name": "p",
        "vllm_addresses": (),
        "tokenizer_path": "t",
        "prompt_length": 1,
        "response_length": 1,
    }
    settings = GatewaySettings.model_validate(flags)
    assert settings.host == "127.0.0.1"
    with pytest.raises(BadRequest, match="without keys"):
        run_gateway(settings.model_copy(update={"host": "0.0.0.0"}))
