"""Anthropic's Messages and OpenAI's Responses: the same requests as in chat, and what the gateway records of them.

The gateway makes a chat request of each, so the engine must get the same prompt, and without sampling give the same
answer. Messages has no seed, hence temperature 0.
"""

from dataclasses import dataclass
from typing import Any

from stepwell.doctor.findings import EXACT, CaseCells, CaseColumn, Finding, Grade
from stepwell.doctor.local_gateway import SHORT, CaseRunner
from stepwell.doctor.replies import MESSAGES, RESPONSES
from stepwell.doctor.verdicts import differing, gaps_between, judge_as_chat, judge_gaps, judge_prompt

GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": None}
BRIEF, HELLO, RAISE = "Be brief.", "Say hello, and how you are.", "Raise the flag!"
TOOL: dict[str, Any] = {"name": "flag", "description": "Raise or lower the flag."}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"up": {"type": "boolean"}}, "required": ["up"]}
CALL_ID, GIVEN, RESULT = "callaaaa1", '{"up":true}', "done"
"""Nine letters and digits: Mistral's templates accept no others."""


@dataclass(frozen=True, slots=True)
class DialectRequests:
    """Two requests as a dialect writes them."""

    turn: dict[str, Any]
    after_tool: dict[str, Any]
    """A conversation with a system prompt and a tool call. It asks for one token, and for no further call, so
    that an engine without a tool parser can answer."""


AS_CHAT = DialectRequests(
    turn={"messages": [{"role": "user", "content": HELLO}]},
    after_tool={
        "messages": [
            {"role": "system", "content": BRIEF},
            {"role": "user", "content": RAISE},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": CALL_ID, "type": "function", "function": {"name": TOOL["name"], "arguments": GIVEN}}
                ],
            },
            {"role": "tool", "tool_call_id": CALL_ID, "content": RESULT},
        ],
        "tools": [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}],
        "tool_choice": "none",
        "max_tokens": 1,
    },
)
AS_MESSAGES = DialectRequests(
    turn={"messages": [{"role": "user", "content": [{"type": "text", "text": HELLO}]}]},
    after_tool={
        "system": BRIEF,
        "messages": [
            {"role": "user", "content": RAISE},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": CALL_ID, "name": TOOL["name"], "input": {"up": True}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": CALL_ID, "content": RESULT}]},
        ],
        "tools": [{**TOOL, "input_schema": SCHEMA}],
        "tool_choice": {"type": "none"},
        "max_tokens": 1,
    },
)
AS_RESPONSES = DialectRequests(
    turn={"input": HELLO, "max_output_tokens": SHORT},
    after_tool={
        "instructions": BRIEF,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": RAISE}]},
            {"type": "function_call", "call_id": CALL_ID, "name": TOOL["name"], "arguments": GIVEN},
            {"type": "function_call_output", "call_id": CALL_ID, "output": RESULT},
        ],
        "tools": [{"type": "function", **TOOL, "parameters": SCHEMA}],
        "tool_choice": "none",
        "max_output_tokens": 1,
    },
)


async def messages(runner: CaseRunner) -> CaseCells:
    return await _compare(runner, MESSAGES, AS_MESSAGES)


async def responses(runner: CaseRunner) -> CaseCells:
    return await _compare(runner, RESPONSES, AS_RESPONSES)


async def _compare(runner: CaseRunner, path: str, requests: DialectRequests) -> CaseCells:
    answers = await runner.ask_twice(path, **requests.turn, **GREEDY)
    cells, whole = await runner.judge(answers), answers.whole
    chat = await runner.ask(**AS_CHAT.turn, **GREEDY)
    if not (whole.is_sound and chat.is_sound):
        return cells
    again = await runner.ask(**AS_CHAT.turn, **GREEDY) if differing(chat, whole) else None
    ids = judge_as_chat(chat, again, whole)
    if ids.grade is Grade.EXACT:
        ids = await _judge_history(runner, path, requests)
    if again is not None or ids.grade is Grade.FAULT:
        return {**cells, CaseColumn.IDS: ids}
    return {**cells, CaseColumn.LOGPROBS: judge_gaps(gaps_between(chat, whole), "this dialect's and chat's")}


async def _judge_history(runner: CaseRunner, path: str, requests: DialectRequests) -> Finding:
    """Judges the conversation with a tool. If chat refuses it, the chat template has no tools, or no system prompt."""
    chat = await runner.ask(**AS_CHAT.after_tool, **GREEDY)
    return judge_prompt(chat, await runner.ask(path, **requests.after_tool, **GREEDY)) if chat.is_sound else EXACT
