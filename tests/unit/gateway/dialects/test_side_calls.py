"""Prompts here are short words of our own after the opening that a rule knows; the openings are the harnesses'."""

import json
from typing import Any

import pytest
from stepwell.gateway.dialects.openai import LAST_MESSAGES, TEXT_READ

from stepwell.errors import BadRequest
from stepwell.gateway.dialects.dialect import DialectContext
from stepwell.gateway.dialects.side_calls import MARKED, SYSTEM_RULES, USER_RULES, SideCallRule, side_call_kind
from tests.unit.gateway.dialects.asking import CHAT, completion

TASK = "Read note.txt and tell me which word it keeps."
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {}}}]


def side_call(request: dict[str, Any], header: str | None) -> str | None:
    """What a chat request is found to be."""
    raw = json.dumps({"model": "m", **request}).encode()
    call = CHAT.read(raw, DialectContext(response_length=100_000))
    return side_call_kind(call.texts, call.request["max_tokens"], header)


def message(role: str, content: object) -> dict[str, Any]:
    return {"role": role, "content": content}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_opencodes_title_call_is_told_from_its_task() -> None:
    titling = message("system", "You are a title generator. You output ONLY a thread title. Be brief.")
    asked = [titling, message("user", "Generate a title for this conversation:\n"), message("user", TASK)]
    assert side_call({"messages": asked, "max_tokens": 32_000}, None) == "title"
    working = message("system", "You are opencode, a tool in a terminal.")
    assert side_call({"messages": [working, message("user", TASK)], "tools": TOOLS}, None) is None


def test_qwen_codes_memory_agent_is_a_side_call_in_every_turn_of_its_own() -> None:
    remembering = message("system", "You are now acting as the managed memory extraction subagent for an assistant.")
    turns = [remembering, message("user", parts(TASK)), message("user", parts("Update the memory folder."))]
    assert side_call({"messages": turns, "tools": TOOLS}, None) == "memory"
    turns += [message("assistant", None), message("tool", "an empty folder")]
    assert side_call({"messages": turns, "tools": TOOLS}, None) == "memory"


def test_a_side_call_that_keeps_the_tasks_system_prompt_is_known_by_the_users_last_message() -> None:
    turns = [message("system", "You are a coding agent."), message("user", TASK), message("assistant", "It is heron.")]
    assert side_call({"messages": turns}, None) is None
    turns.append(message("user", parts("You are now acting as the memory extraction subagent. Look at the last turn.")))
    assert side_call({"messages": turns}, None) == "memory"
    turns += [message("assistant", None), message("tool", "a file")]
    assert side_call({"messages": turns}, None) == "memory"
    turns.append(message("user", "Thank you. And now the next task."))
    assert side_call({"messages": turns}, None) is None


@pytest.mark.parametrize("rule", SYSTEM_RULES, ids=lambda rule: f"{rule.kind}-{rule.seen_in}")
def test_each_system_rule_knows_its_opening_under_both_roles_and_after_claude_codes_own_lines(
    rule: SideCallRule,
) -> None:
    billing, identity = "x-anthropic-billing-header: v=1;", "You are Claude Code, Anthropic's official CLI for Claude."
    for role in ("system", "developer"):
        for content in (f"\n{rule.opening} …", parts(rule.opening), parts(billing, identity, rule.opening)):
            assert side_call({"messages": [message(role, content), message("user", TASK)]}, None) == rule.kind


@pytest.mark.parametrize("rule", USER_RULES, ids=lambda rule: f"{rule.kind}-{rule.seen_in}")
def test_each_user_rule_knows_its_opening_and_nothing_that_merely_quotes_it(rule: SideCallRule) -> None:
    asked: dict[str, Any] = {"max_tokens": rule.max_tokens}
    assert side_call({"messages": [message("user", f"{rule.opening} …")], **asked}, None) == rule.kind
    quoting = f"Why does our agent send this? {rule.opening}"
    assert side_call({"messages": [message("user", quoting)], **asked}, None) is None
    assert side_call({"messages": [message("tool", rule.opening)], **asked}, None) is None


def test_a_quota_probe_asks_for_one_token() -> None:
    probe = {"messages": [message("user", "quota")]}
    assert side_call({**probe, "max_tokens": 1}, None) == "quota_probe"
    assert side_call({**probe, "max_completion_tokens": 1}, None) == "quota_probe"
    assert side_call({**probe, "max_tokens": 100}, None) is None
    assert side_call(probe, None) is None


@pytest.mark.parametrize(
    ("system", "user"),
    [
        ("You are a title generator for news articles.", "Generate a title for this conversation."),
        ("You are a helpful assistant.", "Generate a concise title for my essay on memory. Summarize it first."),
        ("You are a helpful AI assistant tasked with summarizing conversations.", "Summarize this meeting: …"),
        ("You write memories down.", "Remember that I like tea; forget the session title I gave you."),
        ("You are a database expert.", "quota"),
        ("", "Analyze the content and structure of your immediately preceding response. Who should speak next?"),
        ("Compact the conversation when it grows.", "What is CONTEXT CHECKPOINT COMPACTION?"),
    ],
)
def test_an_ordinary_task_about_titles_memory_or_summaries_stays_a_task(system: str, user: str) -> None:
    assert side_call({"messages": [message("system", system), message("user", user)], "max_tokens": 64}, None) is None


def test_the_header_wins_over_the_rules() -> None:
    titling = {"messages": [message("system", SYSTEM_RULES[0].opening), message("user", TASK)]}
    plain = {"messages": [message("user", TASK)]}
    assert (side_call(titling, "task"), side_call(titling, "side")) == (None, MARKED)
    assert (side_call(plain, "task"), side_call(plain, "side")) == (None, MARKED)
    with pytest.raises(BadRequest, match=r'x-stepwell-call is "task" or "side", not \'title\''):
        side_call(plain, "title")


def test_completions_are_side_calls_only_by_the_header() -> None:
    call = completion(prompt=SYSTEM_RULES[0].opening)
    assert side_call_kind(call.texts, 64, None) is None
    assert side_call_kind(call.texts, 64, "side") == MARKED


@pytest.mark.parametrize(
    "messages",
    [[{"role": "user"}], [{"role": "system", "content": [None, 1, {"text": 2}, {"type": "image_url"}]}]],
)
def test_a_message_without_text_makes_no_side_call(messages: object) -> None:
    assert side_call({"messages": messages}, None) is None


def test_only_the_beginning_of_a_text_and_the_last_messages_are_read() -> None:
    opening, user = SYSTEM_RULES[0].opening, message("user", USER_RULES[0].opening)
    assert side_call({"messages": [message("system", " " * TEXT_READ + opening)]}, None) is None
    turns = [message("assistant", "so")] * (LAST_MESSAGES - 1)
    assert side_call({"messages": [user, *turns]}, None) == USER_RULES[0].kind
    assert side_call({"messages": [user, *turns, *turns[:1]]}, None) is None
