"""The claim itself: real vLLM, real Ray, the real gateway command and the real openai package."""

from typing import Any

import httpx
import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

import stepwell
from rig.gateways import GatewayProcess
from rig.vllm_server import VllmServer
from stepwell.pool.client import DataPool
from stepwell.steps.step import Exactness, Step

USER_TURNS = ("Good morning!", "Wie geht's? 你好 🙂", "And then?")
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 24}
FILLED_IN: dict[str, Any] = {
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""What the agent leaves out and the engine is told all the same."""


def converse(client: OpenAI) -> list[list[ChatCompletionMessageParam]]:
    """Three turns, each seeded by its number. The prompts that were sent."""
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": "You are brief."}]
    sent = []
    for seed, text in enumerate(USER_TURNS):
        messages.append({"role": "user", "content": text})
        sent.append(list(messages))
        reply = client.chat.completions.create(model="tiny", messages=messages, seed=seed, **SAMPLING)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    return sent


def straight_from_vllm(
    vllm: VllmServer, messages: list[ChatCompletionMessageParam], seed: int, sampling: dict[str, Any] = SAMPLING
) -> dict[str, Any]:
    asked = {"model": "tiny", "messages": messages, "seed": seed, **sampling}
    answer = httpx.post(
        f"{vllm.url}/v1/chat/completions", json={**asked, "logprobs": True, "return_token_ids": True}, timeout=120
    )
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def assert_is_what_vllm_answers(step: Step, answer: dict[str, Any]) -> None:
    (choice,) = answer["choices"]
    assert step.prompt_ids.tolist() == answer["prompt_token_ids"]
    assert step.response_ids.tolist() == choice["token_ids"]
    assert step.response_logprobs is not None
    told = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]], np.float32)
    np.testing.assert_allclose(step.response_logprobs, told, rtol=0, atol=1e-5)
    assert step.finish_reason == choice["finish_reason"]


@pytest.mark.parametrize("spelling", ["as returned", "with /v1", "without /v1"])
def test_a_three_turn_conversation_becomes_three_steps_that_equal_vllms_own_answers(
    gateway: GatewayProcess, pool: DataPool, vllm: VllmServer, spelling: str
) -> None:
    run = stepwell.connect(gateway.url)
    with run.trajectory(channel="asked", metadata={"spelling": spelling}) as t:
        without = t.base_url.removesuffix("/v1")
        base_url = {"as returned": t.base_url, "with /v1": f"{without}/v1", "without /v1": without}[spelling]
        with OpenAI(base_url=base_url, api_key=t.api_key) as client:
            prompts = converse(client)
        t.reward = 0.5
    (group,) = pool.fetch_batch(1, channel="asked", untrainable=True, timeout=60).groups()
    (steps,) = group
    assert [step.step_index for step in steps] == [0, 1, 2]
    for seed, (step, messages) in enumerate(zip(steps, prompts, strict=True)):
        assert_is_what_vllm_answers(step, straight_from_vllm(vllm, messages, seed))
        assert step.exactness is Exactness.ENGINE
        assert step.sampling == {**FILLED_IN, **SAMPLING, "seed": seed, "logprobs_mode": "processed"}
        assert (step.temperature, step.model, step.untrainable) == (0.8, "tiny", "truncated: top_p is 0.9")
        assert step.metadata == {"spelling": spelling}
        assert step.trajectory_uid == t.trajectory_uid
    assert [step.reward for step in steps] == [None, None, 0.5]
    assert [step.is_last for step in steps] == [False, False, True]


def test_a_channel_that_is_trained_is_sampled_as_the_trainer_computes(
    gateway: GatewayProcess, pool: DataPool, vllm: VllmServer
) -> None:
    with stepwell.connect(gateway.url).trajectory() as t:
        with OpenAI(base_url=t.base_url, api_key=t.api_key) as client:
            (messages, *_) = converse(client)
        t.reward = 0.5
    ((steps,),) = pool.fetch_batch(1, timeout=60).groups()
    on_policy = {**SAMPLING, "temperature": 1.0, "top_p": 1.0}
    assert_is_what_vllm_answers(steps[0], straight_from_vllm(vllm, messages, 0, on_policy))
    assert [(step.temperature, step.untrainable) for step in steps] == [(1.0, None)] * 3
    assert steps[0].sampling["replaced"] == {"temperature": 0.8, "top_p": 0.9}


def test_rollouts_of_one_prompt_come_out_together_past_an_unfinished_group(
    gateway: GatewayProcess, pool: DataPool
) -> None:
    run = stepwell.connect(gateway.url)

    def rollout(prompt_uid: str, reward: float, channel: str = "train") -> None:
        with run.trajectory(prompt_uid=prompt_uid, group_size=4, channel=channel) as t:
            with OpenAI(base_url=t.base_url, api_key=t.api_key) as client:
                message: ChatCompletionMessageParam = {"role": "user", "content": prompt_uid}
                client.chat.completions.create(model="tiny", messages=[message], max_tokens=4)
            t.reward = reward

    for i in range(3):
        rollout("unfinished", i)
        rollout("validated", i, "validation")
    for i in range(4):
        rollout("finished", i)
    rollout("validated", 3, "validation")
    (group,) = pool.fetch_batch(1, timeout=60).groups()
    assert [(steps[0].prompt_uid, steps[0].reward) for steps in group] == [("finished", float(i)) for i in range(4)]
    (validation,) = pool.fetch_batch(1, channel="validation", timeout=60).groups()
    assert {step.prompt_uid for steps in validation for step in steps} == {"validated"}
    with pytest.raises(stepwell.StepwellError, match="'unfinished', has 3 of 4 trajectories complete"):
        pool.fetch_batch(1, timeout=0.1)


def test_generate_gives_the_tokens_and_the_weights_that_wrote_them(gateway: GatewayProcess, vllm: VllmServer) -> None:
    prompt_ids = list(b"Once upon a time")
    wanted = {"prompt_ids": prompt_ids, "sampling_params": {"max_tokens": 12, "seed": 5, "temperature": 1.0}}
    answer = httpx.post(f"{gateway.url}/generate", json=wanted, timeout=120).json()
    direct = httpx.post(
        f"{vllm.url}/inference/v1/generate",
        json={"token_ids": prompt_ids, "sampling_params": {**wanted["sampling_params"], "logprobs": 0}},  # type: ignore[dict-item]
        timeout=60,
    ).json()["choices"][0]
    assert answer["token_ids"] == direct["token_ids"]
    told = [entry["logprob"] for entry in direct["logprobs"]["content"]]
    assert answer["log_probs"] == pytest.approx(told, abs=1e-5)
    assert answer["stop_reason"] == direct["finish_reason"]


def test_the_engines_own_refusals_reach_the_agent_as_the_openai_package_expects(gateway: GatewayProcess) -> None:
    with (
        stepwell.connect(gateway.url).trajectory() as t,
        OpenAI(base_url=t.base_url, api_key=t.api_key) as client,
        pytest.raises(BadRequestError, match="maximum context length"),
    ):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 4000}])


def test_the_models_are_listed_below_a_base_url(gateway: GatewayProcess) -> None:
    with (
        stepwell.connect(gateway.url).trajectory() as t,
        OpenAI(base_url=t.base_url, api_key=t.api_key) as client,
    ):
        assert [model.id for model in client.models.list()] == ["tiny"]
