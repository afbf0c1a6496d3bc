import json
from typing import Any

from stepwell.gateway.dialects.request_rules import AS_ASKED, DEFAULTS, SamplingPolicy
from stepwell.steps.trainable import untrainable_reason

from stepwell.engines.engine import EXTRA_SAMPLING
from stepwell.gateway.dialects.dialect import DialectContext, ModelCall
from tests.unit.gateway.dialects.asking import CHAT, HELLO, asked, chat

FILLED_IN = {**DEFAULTS, **EXTRA_SAMPLING}


def test_every_parameter_that_an_engine_would_choose_itself_is_explicit() -> None:
    for body in (asked(chat()), asked(chat(temperature=None, top_k=None))):
        assert {name: body[name] for name in FILLED_IN} == FILLED_IN
    assert asked(chat(top_p=0.9))["top_p"] == 0.9


def test_a_step_records_what_was_in_force() -> None:
    assert chat(temperature=0.7, seed=3, user="u", stop=["."]).sampling == {
        **FILLED_IN,
        "temperature": 0.7,
        "seed": 3,
        "stop": ["."],
        "max_tokens": 64,
    }


def on_policy(**fields: Any) -> ModelCall:
    around = DialectContext(64, SamplingPolicy(on_policy=True, temperature=0.8))
    return CHAT.read(json.dumps({"model": "m", "messages": HELLO, **fields}).encode(), around)


def test_on_policy_sampling_is_the_trainers_and_what_was_asked_is_kept_beside_it() -> None:
    wild = {"temperature": 0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1, "logit_bias": {"1": 5}}
    call = on_policy(**wild, seed=3)
    body = asked(call)
    assert {name: body[name] for name in FILLED_IN} == {**FILLED_IN, "temperature": 0.8}
    assert "logit_bias" not in body
    assert (call.sampling["replaced"], call.sampling["seed"], call.sampling["top_p"]) == (wild, 3, 1)
    assert untrainable_reason(call.request) is None


def test_on_policy_sampling_relaxes_strict_tools_under_auto_and_nothing_that_the_agent_must_read() -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {}}}
    call = on_policy(tools=[tool], parallel_tool_calls=False, temperature=0.8)
    assert asked(call)["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert call.sampling["replaced"] == {"parallel_tool_calls": False, "strict_tools": 1}
    assert untrainable_reason(call.request) is None
    for demanded in ({"tool_choice": "required"}, {"response_format": {"type": "json_object"}, "tool_choice": "none"}):
        kept = on_policy(tools=[tool], temperature=0.8, **demanded)
        assert asked(kept)["tools"] == [tool]
        assert "replaced" not in kept.sampling
        assert str(untrainable_reason(kept.request)).startswith("constrained: ")


def test_as_asked_changes_nothing() -> None:
    request = {**FILLED_IN, "top_p": 0.5, "min_tokens": 3}
    assert AS_ASKED.apply(dict(request)) == {}
    assert asked(chat(top_p=0.5))["top_p"] == 0.5
