from typing import Any

import pytest

from stepwell.engines.engine import EXTRA_SAMPLING
from stepwell.gateway.dialects.sampling import DEFAULTS, why_constrained
from tests.unit.gateway.dialects.asking import asked, chat

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


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"temperature": 0}, "greedy: temperature is 0"),
        ({"temperature": 0.0}, "greedy: temperature is 0"),
        ({"use_beam_search": True}, "greedy: use_beam_search is set"),
        ({"presence_penalty": 0.5}, "penalties: presence_penalty is 0.5"),
        ({"frequency_penalty": -1}, "penalties: frequency_penalty is -1"),
        ({"repetition_penalty": 1.1}, "penalties: repetition_penalty is 1.1"),
        ({"structured_outputs": {"regex": "a"}}, "constrained: structured_outputs is set"),
        ({"guided_json": {"type": "object"}}, "constrained: guided_json is set"),
        ({"logit_bias": {"1": 5}}, "constrained: logit_bias is set"),
        ({"bad_words": ["x"]}, "constrained: bad_words is set"),
        ({"allowed_token_ids": [1]}, "constrained: allowed_token_ids is set"),
        ({"min_tokens": 3}, "constrained: min_tokens is set"),
        ({"response_format": {"type": "json_object"}}, "constrained: response_format is json_object"),
        ({"tool_choice": "required"}, "constrained: tool_choice demands a call"),
        ({"tool_choice": {"type": "function"}}, "constrained: tool_choice demands a call"),
    ],
)
def test_what_says_little_of_the_policy_is_untrainable_with_its_reason(fields: dict[str, Any], reason: str) -> None:
    assert chat(**fields).untrainable == reason


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1},
        {"min_tokens": 0, "logit_bias": {}, "bad_words": []},
        {"response_format": {"type": "text"}},
        {"tools": [{"type": "function"}], "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"use_beam_search": False},
    ],
)
def test_ordinary_sampling_is_trainable(fields: dict[str, Any]) -> None:
    assert chat(**fields).untrainable is None


def test_a_constraint_is_seen_behind_another_reason() -> None:
    call = chat(temperature=0, presence_penalty=1, response_format={"type": "json_object"})
    assert call.untrainable == "greedy: temperature is 0"
    assert why_constrained(call.request) == "constrained: response_format is json_object"
