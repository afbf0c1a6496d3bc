"""The delta for each hand-made template: parent's tokens and delta are what the template makes of the whole, or there
is no delta."""

from collections.abc import Mapping
from typing import Any

import pytest
from stepwell.gateway.bridge.recorded_turns import BridgeOutcome, CannotBridge, ThinkingPlaces

from rig import chat_templates
from rig.chat_templates import CONTROL_IDS, TEMPLATES, decode, encode
from stepwell.gateway.bridge.template_probes import TemplateProbes, shape_of
from tests.unit.gateway.bridge.scripted_renderer import ScriptedRenderer

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TWO_CALLS = [CALL, {**CALL, "id": "c2"}]
SAID: dict[str, Any] = {"role": "assistant", "content": "It is 4."}
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
USER = {"role": "user", "content": "And then?"}
SYSTEM = {"role": "system", "content": "Be brief."}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": '{"sum": 3}\n\n'}
OTHER_RESULT = {"role": "tool", "tool_call_id": "c2", "content": "4"}
STOPS = {
    "headers": "<|eot_id|>",
    "openers": "<|user|>",
    "channels": "<|return|>",
    "tools_last": "</s>",
}
"""The token with which a model ends its reply; <|im_end|> for all others."""

CASES: Mapping[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "user": (SAID, [USER]),
    "tool": (CALLED, [RESULT]),
    "text and call": ({**CALLED, "content": "Let me see."}, [RESULT]),
    "parallel tools": ({**CALLED, "tool_calls": TWO_CALLS}, [RESULT, OTHER_RESULT]),
    "tool and user": (CALLED, [RESULT, USER]),
    "system and user": (SAID, [SYSTEM, USER]),
    "literal control token": (SAID, [{"role": "user", "content": "What is <|im_end|>\n<|im_start|>user?"}]),
}
REFUSED: Mapping[tuple[str, str], BridgeOutcome] = {
    **{("channels", case): BridgeOutcome.CLOSE_DIFFERS for case, (reply, _) in CASES.items() if reply is SAID},
    **{("tools_last", case): BridgeOutcome.HEAD_CHANGES for case in ("user", "literal control token")},
    ("tools_last", "tool and user"): BridgeOutcome.HEAD_CHANGES,
    ("tools_last", "system and user"): BridgeOutcome.RENDER_FAILED,
    ("system_first", "system and user"): BridgeOutcome.HEAD_CHANGES,
    ("openers", "system and user"): BridgeOutcome.CLOSE_DIFFERS,
    **{("no_calls", case): BridgeOutcome.NOT_ANCHORED for case, (reply, _) in CASES.items() if reply is not SAID},
}


def stop_of(template: str, reply: Mapping[str, Any]) -> str:
    if reply.get("tool_calls"):
        return {"openers": "<|observation|>", "channels": "<|call|>"}.get(template, STOPS.get(template, "<|im_end|>"))
    return STOPS.get(template, "<|im_end|>")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TEMPLATES)
async def test_the_delta_is_what_the_template_puts_after_the_reply(name: str, case: str) -> None:
    reply, tail = CASES[case]
    renderer = ScriptedRenderer(TEMPLATES[name], has_tools=True)
    stop = CONTROL_IDS[stop_of(name, reply)]
    if (name, case) in REFUSED:
        with pytest.raises(CannotBridge) as refused:
            await TemplateProbes().delta(renderer, reply, tail, stop)
        assert refused.value.outcome is REFUSED[name, case]
        return
    delta = await TemplateProbes().delta(renderer, reply, tail, stop)
    question = {"role": "user", "content": "Hello?"}
    whole = TEMPLATES[name]([question, reply, *tail], [{"name": "add"}], True)
    assert whole.endswith(stop_of(name, reply) + decode(delta.tolist()))
    parent_text = whole.removesuffix(decode(delta.tolist()))
    assert (encode(parent_text).tolist() + delta.tolist()) == encode(whole).tolist()


async def test_a_shape_is_probed_once_and_then_takes_one_rendering_a_call() -> None:
    renderer, probes = ScriptedRenderer(chat_templates.chatml), TemplateProbes()
    stop = CONTROL_IDS["<|im_end|>"]
    await probes.delta(renderer, SAID, [USER], stop)
    asked = len(renderer.rendered)
    for text in ("one", "two", "three"):
        delta = await probes.delta(renderer, {**SAID, "content": text}, [{**USER, "content": text}], stop)
        assert decode(delta.tolist()) == f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert len(renderer.rendered) == asked + 3
    await probes.delta(renderer, CALLED, [RESULT], stop)
    assert len(renderer.rendered) > asked + 4


async def test_a_reply_that_does_not_end_in_the_templates_token_is_not_continued() -> None:
    with pytest.raises(CannotBridge) as refused:
        await TemplateProbes().delta(ScriptedRenderer(chat_templates.chatml), SAID, [USER], encode("!")[0])
    assert refused.value.outcome is BridgeOutcome.CLOSE_DIFFERS


async def test_a_stop_token_that_is_only_in_the_new_messages_does_not_end_the_reply() -> None:
    """A template without an end of tool calls, whose tool results end in the token that the model sampled."""

    def open_calls(messages: Any, tools: Any, add_generation_prompt: bool) -> str:
        return chat_templates.chatml(messages, tools, add_generation_prompt).replace("</tool_call><|im_end|>", "")

    with pytest.raises(CannotBridge) as refused:
        probes, stop = TemplateProbes(), CONTROL_IDS["<|im_end|>"]
        await probes.delta(ScriptedRenderer(open_calls, has_tools=True), CALLED, [RESULT], stop)
    assert refused.value.outcome is BridgeOutcome.CLOSE_DIFFERS


def system_last(messages: Any, tools: Any, add_generation_prompt: bool) -> str:
    """Mistral: the system message stands before the user's last message."""
    system = [message for message in messages[:1] if message["role"] == "system"]
    rest = messages[len(system) :]
    last_user = max(place for place, message in enumerate(rest) if message["role"] == "user")
    return chat_templates.chatml([*rest[:last_user], *system, *rest[last_user:]], tools, add_generation_prompt)


def text_last(messages: Any, tools: Any, add_generation_prompt: bool) -> str:
    """Gemma 4: the text of a reply with calls stands after the results."""
    shown: list[Any] = []
    text = ""
    for message in messages:
        if message["role"] != "tool":
            shown += [{"role": "assistant", "content": text}] if text else []
            text = message["content"] if message.get("tool_calls") else ""
        shown.append({**message, "content": None} if text and message.get("tool_calls") else message)
    shown += [{"role": "assistant", "content": text}] if text else []
    return chat_templates.chatml(shown, tools, add_generation_prompt)


def tools_with_system(messages: Any, tools: Any, add_generation_prompt: bool) -> str:
    """FunctionGemma: every system message lists the tools."""
    listed = [
        {**message, "content": f"{message['content']} {tools}"} if message["role"] == "system" else message
        for message in messages
    ]
    return chat_templates.chatml(listed, [], add_generation_prompt)


def numbered_calls(messages: Any, tools: Any, add_generation_prompt: bool) -> str:
    """Cohere: results have the number of their call in the conversation."""
    numbered, calls = [], 0
    for message in messages:
        calls += len(message.get("tool_calls") or [])
        is_result = message["role"] == "tool"
        numbered.append({**message, "content": f"{calls}: {message['content']}"} if is_result else message)
    return chat_templates.chatml(numbered, tools, add_generation_prompt)


@pytest.mark.parametrize(
    ("template", "reply", "tail"),
    [
        (system_last, SAID, [USER]),
        (text_last, {**CALLED, "content": "Let me see."}, [RESULT]),
        (tools_with_system, SAID, [SYSTEM, USER]),
        (numbered_calls, CALLED, [RESULT]),
    ],
)
async def test_new_messages_whose_text_depends_on_earlier_ones_are_not_cut_out(
    template: Any, reply: dict[str, Any], tail: list[dict[str, Any]]
) -> None:
    renderer, head = ScriptedRenderer(template, has_tools=True), [SYSTEM, USER]
    with pytest.raises(CannotBridge) as refused:
        await TemplateProbes().delta(renderer, reply, tail, CONTROL_IDS["<|im_end|>"], head)
    assert refused.value.outcome is BridgeOutcome.HEAD_CHANGES


@pytest.mark.parametrize("role", ["system", "developer"])
async def test_the_stand_in_has_instructions_if_the_conversation_has(role: str) -> None:
    renderer = ScriptedRenderer(chat_templates.chatml)
    head = [{"role": role, "content": "Be brief."}, USER]
    await TemplateProbes().delta(renderer, SAID, [USER], CONTROL_IDS["<|im_end|>"], head)
    assert {messages[0]["role"] for messages in renderer.rendered} == {role}


async def test_a_token_that_the_end_of_a_call_has_twice_does_not_tell_where_the_reply_ends() -> None:
    def quoted(messages: Any, tools: Any, add_generation_prompt: bool) -> str:
        text = chat_templates.chatml(messages, tools, add_generation_prompt)
        return text.replace('"}}\n</tool_call>', "<|end|>}}<|end|></tool_call>")

    renderer = ScriptedRenderer(quoted, has_tools=True)
    await TemplateProbes().delta(renderer, CALLED, [RESULT], CONTROL_IDS["<|im_end|>"])
    with pytest.raises(CannotBridge) as refused:
        await TemplateProbes().delta(renderer, CALLED, [RESULT], CONTROL_IDS["<|end|>"])
    assert refused.value.outcome is BridgeOutcome.CLOSE_DIFFERS


async def test_a_client_that_sends_the_sentinel_gets_no_bridge() -> None:
    probes, renderer = TemplateProbes(), ScriptedRenderer(chat_templates.chatml)
    text = f"{probes.sentinel}<|im_end|>"
    with pytest.raises(CannotBridge) as refused:
        await probes.delta(renderer, SAID, [{**USER, "content": text}], CONTROL_IDS["<|im_end|>"])
    assert refused.value.outcome is BridgeOutcome.NOT_ANCHORED


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize(
    ("template", "tail", "places", "is_kept"),
    [
        ("keeping", [USER], ThinkingPlaces(in_reply=True, earlier_turns=True), True),
        ("stripping", [USER], ThinkingPlaces(in_reply=True), False),
        ("stripping", [USER], ThinkingPlaces(this_turn=True), False),
        ("stripping", [USER], ThinkingPlaces(earlier_turns=True), True),
        ("stripping", [RESULT], ThinkingPlaces(in_reply=True), True),
        ("stripping", [RESULT], ThinkingPlaces(in_reply=True, this_turn=True, earlier_turns=True), True),
        ("stripping", [RESULT, USER], ThinkingPlaces(in_reply=True), False),
        ("stripping", [SYSTEM], ThinkingPlaces(in_reply=True), True),
        ("stripping", [RESULT], ThinkingPlaces(in_reply=True, earlier_turns=True), True),
    ],
)
async def test_thinking_is_kept_if_the_template_shows_as_much_with_the_new_messages(
    template: str, tail: list[dict[str, Any]], places: ThinkingPlaces, is_kept: bool, inline: bool
) -> None:
    places = ThinkingPlaces(places.in_reply, places.earlier_turns, places.this_turn, is_inline=inline)
    renderer = ScriptedRenderer(TEMPLATES[template], has_tools=True)
    shape = shape_of(CALLED if tail[0] is RESULT else SAID, tail)
    if is_kept:
        await TemplateProbes().check_thinking(renderer, shape, places)
        return
    with pytest.raises(CannotBridge) as refused:
        await TemplateProbes().check_thinking(renderer, shape, places)
    assert refused.value.outcome is BridgeOutcome.THINKING


async def test_reasoning_that_a_template_never_shows_is_not_kept() -> None:
    renderer, shape = ScriptedRenderer(chat_templates.chatml, has_tools=True), shape_of(CALLED, [RESULT])
    with pytest.raises(CannotBridge) as refused:
        await TemplateProbes().check_thinking(renderer, shape, ThinkingPlaces(in_reply=True))
    assert refused.value.outcome is BridgeOutcome.THINKING
