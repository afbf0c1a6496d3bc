"""The case with tools: a call that the model makes freely, else one that tool_choice "required" forces."""

import json
from dataclasses import replace
from typing import Any

from stepwell.doctor.case_runner import SEED, CaseAnswers, CaseRunner, first_answer_row
from stepwell.doctor.findings import CaseColumn, CaseRow, Finding, Grade
from stepwell.doctor.replies import ExaminedAnswer, ParsedReply, ToolCall
from stepwell.doctor.verdicts import GRAMMAR, judge_ids

CALL_TOKENS = 256
"""Tokens within which a call must be complete."""
TRIES, CHOICES = 6, 4
"""How often a call is forced, and with how many choices each time: an untrained model needs several."""
NO_PARSER = "start vLLM with --enable-auto-tool-choice and the --tool-call-parser of your model"
FLAG = {
    "type": "function",
    "function": {
        "name": "flag",
        "description": "Raise or lower the flag.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"up": {"type": "boolean"}},
            "required": ["up"],
            "additionalProperties": False,
        },
    },
}
USER: dict[str, Any] = {"role": "user", "content": "Raise the flag!"}
REQUEST: dict[str, Any] = {"messages": [USER], "tools": [FLAG], "max_tokens": CALL_TOKENS}


async def tools(runner: CaseRunner) -> CaseRow:
    free = await runner.ask(**REQUEST, tool_choice="auto")
    if "--tool-call-parser" in free.failure:
        return CaseRow("tools", {CaseColumn.IDS: replace(judge_ids(free), remedy=NO_PARSER)})
    if not free.is_sound:
        return first_answer_row("tools", free)
    if calling_choice(free) is not None:
        answers = await runner.ask_twice(**REQUEST, tool_choice="auto")
        if (choice := calling_choice(answers.whole)) is not None:
            return await _row(runner, answers, choice, rescored=None)
    return await _forced_call(runner, free)


def tool_parser(row: CaseRow) -> Finding:
    """The check of the engine's tool parser, from the row of the case."""
    ids, text = row.cell(CaseColumn.IDS), row.cell(CaseColumn.TEXT)
    if ids.remedy == NO_PARSER:
        return Finding(Grade.FAULT, "off: calls with tools are refused", NO_PARSER)
    if Grade.FAULT in (ids.grade, text.grade) or text.grade is Grade.UNKNOWN:
        return Finding(Grade.UNKNOWN, "could not be found out: see the table")
    return Finding(Grade.OK, "on: a call was parsed, and its ids contain it")


def calling_choice(answer: ExaminedAnswer) -> int | None:
    """The first choice with a complete tool call."""
    ends = ("tool_calls", "stop")
    calling = (i for i, reply in enumerate(answer.replies) if reply.tools and reply.finish_reason in ends)
    return None if answer.failure else next(calling, None)


async def _forced_call(runner: CaseRunner, free: ExaminedAnswer) -> CaseRow:
    """vLLM samples choice i of a seed like a single choice of seed + i, so several seeds are tried in one call."""
    forced = {**REQUEST, "tool_choice": "required"}
    for attempt in range(TRIES):
        seed = SEED + attempt * CHOICES
        tried = await runner.ask(**{**forced, "n": CHOICES, "seed": seed})
        if not tried.is_sound:
            return first_answer_row("tools", tried)
        if (found := calling_choice(tried)) is None:
            continue
        answers = await runner.ask_twice(**{**forced, "seed": seed + found})
        if (choice := calling_choice(answers.whole)) is not None:
            return await _row(runner, answers, choice, rescored=GRAMMAR)
    why = f"the model completed no call within {CALL_TOKENS} tokens, in {TRIES * CHOICES} tries"
    return first_answer_row("tools", free).with_cell(CaseColumn.TEXT, Finding(Grade.UNKNOWN, why))


async def _row(runner: CaseRunner, answers: CaseAnswers, choice: int, *, rescored: Finding | None) -> CaseRow:
    whole, reply = answers.whole, answers.whole.replies[choice]
    following = await runner.ask(messages=[USER, *_history(reply)], tools=[FLAG])
    prefix = await runner.prefix(ExaminedAnswer(steps=whole.steps[choice : choice + 1]), following)
    row = await runner.row("tools", answers, prefix=prefix, rescored=rescored)
    wrong = next((call for call in reply.tools if not _is_valid(call)), None)
    if wrong is None or row.cell(CaseColumn.TEXT).grade is Grade.FAULT:
        return row
    what = f"the parsed call does not fit the tool: {wrong.name}({wrong.arguments})"
    return row.with_cell(CaseColumn.TEXT, Finding(Grade.FAULT, what, NO_PARSER))


def _history(reply: ParsedReply) -> list[dict[str, Any]]:
    """The messages that follow from a reply with calls, with the results of the calls."""
    calls = [
        {"id": f"call-{i}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for i, call in enumerate(reply.tools)
    ]
    said = {"role": "assistant", "content": reply.text or None, "tool_calls": calls}
    return [said, *({"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls)]


def _is_valid(call: ToolCall) -> bool:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return False
    return call.name == "flag" and isinstance(arguments, dict) and isinstance(arguments.get("up"), bool)
