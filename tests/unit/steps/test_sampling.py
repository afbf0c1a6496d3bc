import logging
from typing import Any

import pytest
from stepwell.steps.trainable import (
    LeftOutLog,
    constrained_reason,
    sampling_kind,
    sampling_note,
    untrainable_reason,
    with_distribution,
)

from rig.builders import make_step

STRICT = {"type": "function", "function": {"name": "f", "strict": True}}
LOOSE = {"type": "function", "function": {"name": "f", "strict": False}}
IMAGE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
PICTURE = "data:image/png;base64,AAAA"
SAID = {"type": "text", "text": "hi"}
WITHOUT_A_TYPE = "multimodal: a message has a part without a type"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"temperature": 0}, "greedy: temperature is 0"),
        ({"temperature": 0.0}, "greedy: temperature is 0"),
        (
            {"temperature": 0.005},
            "greedy: temperature 0.005 is below 0.01, and engines sample at another one in its place",
        ),
        ({"use_beam_search": True}, "greedy: use_beam_search is set"),
        ({"presence_penalty": 0.5}, "penalties: presence_penalty is 0.5"),
        ({"frequency_penalty": -1}, "penalties: frequency_penalty is -1"),
        ({"repetition_penalty": 1.1}, "penalties: repetition_penalty is 1.1"),
        ({"top_p": 0.95}, "truncated: top_p is 0.95"),
        ({"top_k": 20}, "truncated: top_k is 20"),
        ({"min_p": 0.1}, "truncated: min_p is 0.1"),
        ({"structured_outputs": {"regex": "a"}}, "constrained: structured_outputs is set"),
        ({"guided_json": {"type": "object"}}, "constrained: guided_json is set"),
        ({"logit_bias": {"1": 5}}, "constrained: logit_bias is set"),
        ({"bad_words": ["x"]}, "constrained: bad_words is set"),
        ({"allowed_token_ids": [1]}, "constrained: allowed_token_ids is set"),
        ({"min_tokens": 3}, "constrained: min_tokens is set"),
        ({"ignore_eos": True}, "constrained: ignore_eos is set, so that it goes on after its end"),
        ({"thinking_token_budget": 100}, "constrained: thinking_token_budget is set"),
        ({"watermarking": True}, "constrained: watermarking is set"),
        ({"response_format": {"type": "json_object"}}, "constrained: response_format is json_object"),
        ({"tool_choice": "required"}, "constrained: tool_choice demands a call"),
        ({"tool_choice": {"type": "function"}}, "constrained: tool_choice demands a call"),
        ({"tools": [LOOSE, STRICT]}, "constrained: a tool is strict, so that a grammar forms its calls"),
        (
            {"tools": [LOOSE], "tool_choice": "auto", "parallel_tool_calls": False},
            "constrained: parallel_tool_calls is false, which allows a single call",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "See:"}, IMAGE]}]},
            "multimodal: a message has a part of type image_url",
        ),
        ({"messages": [{"role": "user", "content": [{"image_url": PICTURE}]}]}, WITHOUT_A_TYPE),
        ({"messages": [{"role": "user", "content": [{"type": None, "video_url": {"url": PICTURE}}]}]}, WITHOUT_A_TYPE),
        ({"messages": [{"role": "user", "content": [{"image_embeds": "x"}]}]}, WITHOUT_A_TYPE),
        ({"messages": [{"role": "user", "content": [{"text": "hi"}]}]}, WITHOUT_A_TYPE),
        ({"messages": [{"role": "user", "content": [7]}]}, WITHOUT_A_TYPE),
        (
            {"messages": [{"role": "user", "content": [{"type": ["text"], "text": "hi"}]}]},
            "multimodal: a message has a part of type ['text']",
        ),
        (
            {"messages": [{"role": "tool", "content": [{**SAID, "uuid": "u", "image_url": PICTURE}]}]},
            "multimodal: a message has a part of type text with the field image_url, which an engine may read as data",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no", "uuid": "u"}]}]},
            "multimodal: a message has a part of type refusal with the field uuid, which an engine may read as data",
        ),
    ],
)
def test_what_says_little_of_the_policy_is_untrainable_with_its_reason(fields: dict[str, Any], reason: str) -> None:
    assert untrainable_reason(fields) == reason


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
        {"top_p": None, "top_k": 0},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1},
        {"min_tokens": 0, "logit_bias": {}, "bad_words": []},
        {"response_format": {"type": "text"}},
        {"tools": [LOOSE], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": [STRICT], "tool_choice": "none"},
        {"parallel_tool_calls": False},
        {"tool_choice": "none"},
        {"use_beam_search": False, "ignore_eos": False},
        {"temperature": 0.01},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": ["hi", {**SAID, "cache_control": {"type": "ephemeral"}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "closed": True}]}]},
        {"messages": [{"role": "assistant", "content": [{**SAID, "type": "output_text", "annotations": []}]}]},
        {"messages": [{"role": "user", "content": [{**SAID, "uuid": None, "image_url": None}]}]},
    ],
)
def test_ordinary_sampling_is_trainable(fields: dict[str, Any]) -> None:
    assert untrainable_reason(fields) is None


@pytest.mark.parametrize(
    "tools", [7, "x", {"function": 1}, [None, 3, {"function": "f"}, {"function": {"strict": None}}]]
)
def test_tools_of_any_shape_are_looked_at(tools: object) -> None:
    assert untrainable_reason({"tools": tools, "messages": tools}) is None


def test_an_answer_that_goes_on_after_its_end_can_be_continued() -> None:
    assert constrained_reason({"ignore_eos": True}) is None


def test_a_constraint_is_seen_behind_another_reason() -> None:
    fields = {"temperature": 0, "presence_penalty": 1, "response_format": {"type": "json_object"}}
    assert untrainable_reason(fields) == "greedy: temperature is 0"
    assert constrained_reason(fields) == "constrained: response_format is json_object"


def test_another_model_than_the_trained_one_is_told_if_both_are_known() -> None:
    reason = untrainable_reason({}, model="lora-7", trained_model="tiny")
    assert reason == "model: lora-7 wrote it, and tiny is trained"
    for model, trained in (("tiny", "tiny"), ("", "tiny"), ("lora-7", "")):
        assert untrainable_reason({}, model=model, trained_model=trained) is None


def test_raw_log_probabilities_are_the_policys_at_temperature_1_only() -> None:
    hot = untrainable_reason({"temperature": 0.7}, logprobs_mode="raw")
    assert hot == "raw_logprobs: the engine reports log-probabilities of temperature 1, not of 0.7"
    assert untrainable_reason({"temperature": 1.0}, logprobs_mode="raw") is None
    assert untrainable_reason({"temperature": 0.7}, logprobs_mode="processed") is None


def test_log_probabilities_of_an_engine_that_does_not_tell_its_mode_are_the_policys_at_temperature_1_only() -> None:
    hot = untrainable_reason({"temperature": 0.7}, logprobs_mode="unknown")
    assert hot == (
        "unknown_logprobs: the engine does not tell whether its log-probabilities are those of temperature 0.7 or of 1"
    )
    for same in ({}, {"temperature": None}, {"temperature": 1}):
        assert untrainable_reason(same, logprobs_mode="unknown") is None
    assert untrainable_reason({"temperature": 0.7}) is None, "who sends a step without a mode vouches for it"


def test_a_step_takes_its_temperature_and_its_reason_from_its_sampling() -> None:
    told = with_distribution(make_step(sampling={"temperature": 0.5, "top_p": 0.9}))
    assert (told.temperature, told.untrainable) == (0.5, "truncated: top_p is 0.9")
    own = with_distribution(make_step(sampling={"temperature": 0.5}, temperature=0.25))
    assert (own.temperature, own.untrainable) == (0.25, None)
    for sampling in ({}, {"temperature": "hot"}, {"temperature": True}, {"temperature": 10**400}):
        unknown = with_distribution(make_step(sampling=sampling))
        assert (unknown.temperature, unknown.untrainable) == (None, None)


def test_each_cause_is_logged_once_in_each_channel_and_side_calls_never(caplog: pytest.LogCaptureFixture) -> None:
    log = LeftOutLog(logging.getLogger("stepwell.test"), "; see the docs")
    reasons = ["truncated: top_p is 0.9", None, "truncated: top_k is 3", "side_call: title", "greedy: temperature is 0"]
    log.note("train", reasons)
    log.note("train", reasons)
    log.note("eval", reasons[:1])
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in said] == ["channel train", "channel train", "channel eval"]
    assert "as truncated: top_p is 0.9" in said[0]
    assert said[0].endswith("; see the docs")


def test_the_share_of_a_channel_is_logged_after_a_hundred_steps_and_ten_times_as_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = LeftOutLog(logging.getLogger("stepwell.test"))
    for _ in range(1_200):
        log.note("train", ["truncated: top_p is 0.9", None])
        log.note("eval", [None, "side_call: title"])
    shares = [line for line in (record.getMessage() for record in caplog.records) if "% of the last" in line]
    assert [line.partition(" are left out")[0] for line in shares] == [
        "50% of the last 100 steps of channel train",
        "50% of the last 1,000 steps of channel train",
    ]


def test_a_note_has_the_share_the_causes_and_the_choices() -> None:
    note = sampling_note("mine", {"": 38, "truncated": 60, "greedy": 2})
    assert note is not None
    assert note.startswith("62% of the last 100 steps of channel mine are left out of training for their sampling")
    assert "(2 greedy: a temperature below 0.01, or beam search; 60 truncated: top_p, top_k or min_p)" in note
    for choice in ("--sampling mine=on_policy", "mine=all_on_policy", "untrainable=True"):
        assert choice in note


@pytest.mark.parametrize("recent", [{"truncated": 19}, {"": 91, "truncated": 9}, {"": 500}, {}])
def test_few_steps_or_a_small_share_are_not_noted(recent: dict[str, int]) -> None:
    assert sampling_note("train", recent) is None


@pytest.mark.parametrize(
    ("reason", "kind"),
    [(None, ""), ("truncated: top_p is 0.9", "truncated"), ("side_call: title", ""), ("model: a wrote it", "")],
)
def test_only_reasons_of_sampling_have_a_sampling_kind(reason: str | None, kind: str) -> None:
    assert sampling_kind(reason) == kind
