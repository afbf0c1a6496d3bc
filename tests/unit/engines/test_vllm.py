import json
from dataclasses import replace
from typing import Any

import pytest

from stepwell.engines.engine import EngineFacts
from stepwell.engines.vllm import VllmEngine
from stepwell.errors import EngineUnavailable
from stepwell.steps.step import ids_array, logprobs_array
from stepwell.wire.openai import Sampled

VLLM = VllmEngine()
SAMPLED = Sampled(ids_array([1, 2]), ids_array([7, 8, 9]), logprobs_array([-0.5, -1.0, -1.5]), "stop")


def derendered(message: Any) -> bytes:
    return json.dumps({"choices": [{"message": message}]}).encode()


@pytest.mark.parametrize(("named", "model"), [({}, "served"), ({"model": None}, "served"), ({"model": "lora"}, "lora")])
def test_a_generation_is_of_the_model_it_names_or_of_the_one_that_is_served(named: dict[str, Any], model: str) -> None:
    reply = {**named, "choices": [{"token_ids": [7], "finish_reason": "stop"}]}
    generated = VLLM.read_generated(json.dumps(reply).encode(), [1], EngineFacts(model="served"))
    assert generated.sampled.model == model


def test_a_version_that_is_too_old_for_token_ids_says_so_to_white_box_agents() -> None:
    with pytest.raises(EngineUnavailable, match=r"vLLM 0\.10\.1 gives no token ids: use vLLM 0\.11 or newer"):
        VLLM.generation([1, 2], {}, EngineFacts(server_version="0.10.1"))


def test_the_engine_is_asked_what_the_tokens_of_one_choice_spell() -> None:
    request = {"model": "m", "stream": True, "stream_options": {}, "n": 2, "tools": [{"type": "function"}]}
    path, raw = VLLM.derender(request, SAMPLED)
    assert path == "/v1/chat/completions/derender"
    body = json.loads(raw or b"")
    (choice,) = body["generate_response"]["choices"]
    assert (choice["token_ids"], body["prompt_token_ids"]) == ([7, 8], [1, 2]), "all but the token that ends it"
    assert body["chat_request"]["tools"] == [{"type": "function"}]
    assert not {"stream", "stream_options", "n"} & set(body["chat_request"])


def test_a_stop_string_is_no_part_of_the_text() -> None:
    stopped = replace(SAMPLED, stop_string="END")
    for written, left in (("so END.", "so "), ("so", "so"), (None, None)):
        assert VLLM.read_derendered(derendered({"content": written}), stopped)["content"] == left


@pytest.mark.parametrize(
    "message",
    [None, {"content": 1}, {"reasoning_content": []}, {"tool_calls": [{}]}, {"tool_calls": [{"function": 1}]}],
)
def test_a_derendered_message_of_the_wrong_shape_is_the_engines_failure(message: Any) -> None:
    with pytest.raises(EngineUnavailable, match="derendered answer"):
        VLLM.read_derendered(derendered(message), SAMPLED)
