"""The case of the tools: a call of the model's own will, if it makes one; else one that it is made to make."""

import json
from dataclasses import replace
from typing import Any

from stepwell.doctor.answer import Answer
from stepwell.doctor.case_runner import SEED, Asked, Asking, recorded_only
from stepwell.doctor.findings import Column, Finding, Mark, Row
from stepwell.doctor.replies import Heard, ToolCall
from stepwell.doctor.verdicts import GRAMMAR, judge_ids

LONGER = 256
"""Tokens in which a call must come to its end."""
TRIES, AT_ONCE = 6, 4
"""How often a call is demanded, and how many choices each time: a model that was never trained needs some."""
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
WISH: dict[str, Any] = {"role": "user", "content": "Raise the flag!"}
REQUEST: dict[str, Any] = {"messages": [WISH], "tools": [FLAG], "max_tokens": LONGER}


async def tools(asking: Asking) -> Row:
    free = await asking.ask(**REQUEST, tool_choice="auto")
    if "--tool-call-parser" in free.failure:
        return Row("tools", {Column.IDS: replace(judge_ids(free), remedy=NO_PARSER)})
    if not free.is_sound:
        return recorded_only("tools", free)
    if calling(free) is not None:
        asked = await asking.ask_twice(**REQUEST, tool_choice="auto")
        if (called := calling(asked.whole)) is not None:
            return await _row(asking, asked, called, rescored=None)
    return await _demanded(asking, free)


def tool_parser(row: Row) -> Finding:
    """What that says of the engine's parser."""
    ids, text = row.cell(Column.IDS), row.cell(Column.TEXT)
    if ids.remedy == NO_PARSER:
        return Finding(Mark.FAULT, "off: agents with tools are refused", NO_PARSER)
    if Mark.FAULT in (ids.mark, text.mark) or text.mark is Mark.UNTOLD:
        return Finding(Mark.UNTOLD, "could not be found out: see the table")
    return Finding(Mark.OK, "on: a call was parsed, and its ids spell it")


def calling(answer: Answer) -> int | None:
    """The choice that calls a tool, and comes to its end."""
    ends = ("tool_calls", "stop")
    called = (i for i, heard in enumerate(answer.heard) if heard.tools and heard.finish_reason in ends)
    return None if answer.failure else next(called, None)


async def _demanded(asking: Asking, free: Answer) -> Row:
    """vLLM gives choice i of a seed what the seed plus i gives alone; so several are tried at once."""
    demand = {**REQUEST, "tool_choice": "required"}
    for attempt in range(TRIES):
        seed = SEED + attempt * AT_ONCE
        tried = await asking.ask(**{**demand, "n": AT_ONCE, "seed": seed})
        if not tried.is_sound:
            return recorded_only("tools", tried)
        if (found := calling(tried)) is None:
            continue
        asked = await asking.ask_twice(**{**demand, "seed": seed + found})
        if (called := calling(asked.whole)) is not None:
            return await _row(asking, asked, called, rescored=GRAMMAR)
    why = f"the model did not end a call within {LONGER} tokens, in {TRIES * AT_ONCE} tries"
    return recorded_only("tools", free).with_cell(Column.TEXT, Finding(Mark.UNTOLD, why))


async def _row(asking: Asking, asked: Asked, called: int, *, rescored: Finding | None) -> Row:
    whole, heard = asked.whole, asked.whole.heard[called]
    then = await asking.ask(messages=[WISH, *_after(heard)], tools=[FLAG])
    prefix = await asking.prefix(Answer(steps=whole.steps[called : called + 1]), then)
    row = await asking.row("tools", asked, prefix=prefix, rescored=rescored)
    wrong = next((call for call in heard.tools if not _is_right(call)), None)
    if wrong is None or row.cell(Column.TEXT).mark is Mark.FAULT:
        return row
    what = f"the call that was parsed is not the tool's: {wrong.name}({wrong.arguments})"
    return row.with_cell(Column.TEXT, Finding(Mark.FAULT, what, NO_PARSER))


def _after(heard: Heard) -> list[dict[str, Any]]:
    """The history that a call leaves, its result included."""
    calls = [
        {"id": f"call-{i}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for i, call in enumerate(heard.tools)
    ]
    said = {"role": "assistant", "content": heard.text or None, "tool_calls": calls}
    return [said, *({"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls)]


def _is_right(call: ToolCall) -> bool:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return False
    return call.name == "flag" and isinstance(arguments, dict) and isinstance(arguments.get("up"), bool)
