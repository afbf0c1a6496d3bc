"""The cases: what agents do."""

import json
import unicodedata
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from stepwell.doctor.findings import NOTHING, CaseCells, CaseColumn, CaseRow, Finding, Grade
from stepwell.doctor.local_gateway import HELLO, SEED, CaseAnswers, CaseRunner, judge_only
from stepwell.doctor.replies import COMPLETIONS, ExaminedAnswer, ParsedReply, ToolCall
from stepwell.doctor.verdicts import GRAMMAR, REPLACEMENT, first_difference, judge_bridge, judge_ids
from stepwell.steps.step import Step

UNICODE = "naïve ☕ 日本語 𝄞 👩‍🚀 cafe\u0301"
"""Characters of two, three and four bytes, one joined from three others, and one in decomposed form."""
UNICODE_TOKENS = 128
"""Enough for this text with one token per byte."""
PLAIN = "Good, thank you."
AGAIN: dict[str, Any] = {"role": "user", "content": "And again?"}
CALL_TOKENS = 256
"""Tokens within which a call must be complete."""
TRIES, CHOICES = 6, 4
"""How often a call is forced, and with how many choices each time: an untrained model needs several."""
PUZZLE = {"role": "user", "content": "Which is larger, 9.9 or 9.11? Think first."}
THINKING_TOKENS = 256
NO_THINKING = Finding(
    Grade.UNKNOWN,
    "the model wrote no thinking",
    "if it is a reasoning model, see its chat template and vLLM's --reasoning-parser",
)
UNPARSED = Finding(
    Grade.WARNING,
    "the thinking is part of the text, which agents take for the answer",
    "start vLLM with the --reasoning-parser of your model",
)
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


async def single_turn(runner: CaseRunner) -> CaseCells:
    return await runner.judge(await runner.ask_twice(messages=[HELLO]))


async def multi_turn(runner: CaseRunner) -> CaseCells:
    first = await _text_turn(runner)
    if not first.is_sound:
        return judge_only(first)
    answers = await runner.ask_twice(**_next_turn(first.replies[0]))
    return await runner.judge(answers, prefix=await runner.prefix(first, answers.whole))


async def tools(runner: CaseRunner) -> CaseCells:
    free = await runner.ask(**REQUEST, tool_choice="auto")
    if "--tool-call-parser" in free.failure:
        return {CaseColumn.IDS: replace(judge_ids(free), remedy=NO_PARSER)}
    if not free.is_sound:
        return judge_only(free)
    if calling_choice(free) is not None:
        answers = await runner.ask_twice(**REQUEST, tool_choice="auto")
        if (choice := calling_choice(answers.whole)) is not None:
            return await _judge_call(runner, answers, choice, rescored=None)
    return await _forced_call(runner, free)


async def unicode(runner: CaseRunner) -> CaseCells:
    """A grammar allows only one text, so every model writes it."""
    request = {"role": "user", "content": f"Repeat: {UNICODE}"}
    grammar = {"choice": [UNICODE]}
    answers = await runner.ask_twice(messages=[request], structured_outputs=grammar, max_tokens=UNICODE_TOKENS)
    cells = await runner.judge(answers, expected=UNICODE, rescored=GRAMMAR)
    if answers.whole.is_sound and (fault := await _prompt_fault(runner, answers.whole.steps[0])) is not None:
        return {**cells, CaseColumn.TEXT: fault}
    return cells


async def several_choices(runner: CaseRunner) -> CaseCells:
    return await runner.judge(await runner.ask_twice(messages=[HELLO], n=3))


async def stop_string(runner: CaseRunner) -> CaseCells:
    """The answer of the single turn, stopped by a string that it contains."""
    free = await runner.ask(messages=[HELLO])
    stop = stop_within(free.replies[0].text if free.replies else "")
    if not free.is_sound or stop is None:
        return judge_only(free)
    answers = await runner.ask_twice(messages=[HELLO], stop=[stop])
    cells = await runner.judge(answers, stop=stop)
    unstopped = any(stop in reply.text or reply.finish_reason != "stop" for reply in answers.whole.replies)
    if unstopped and answers.whole.is_sound and _same_start(free.steps[0], answers.whole.steps[0]):
        fault = Finding(Grade.FAULT, f"the stop string {stop!r} did not end the answer", "does a proxy drop stop?")
        return {**cells, CaseColumn.TEXT: fault}
    return cells


async def completions(runner: CaseRunner) -> CaseCells:
    return await runner.judge(await runner.ask_twice(COMPLETIONS, prompt="Once upon a time"))


async def reasoning(runner: CaseRunner) -> CaseCells:
    """Thinking that the engine's parser tells apart is in the ids, and the next turn is asked for with it."""
    answers = await runner.ask_twice(messages=[PUZZLE], max_tokens=THINKING_TOKENS)
    if not answers.whole.is_sound:
        return judge_only(answers.whole)
    reply, prefix = answers.whole.replies[0], NOTHING
    if reply.reasoning and reply.finish_reason == "stop":
        said = {"role": "assistant", "content": reply.text, "reasoning": reply.reasoning}
        following = await runner.ask(messages=[PUZZLE, said, AGAIN])
        prefix = await runner.prefix(answers.whole, following)
    cells = await runner.judge(answers, prefix=prefix)
    if reply.reasoning or cells[CaseColumn.TEXT].grade is Grade.FAULT:
        return cells
    return {**cells, CaseColumn.TEXT: UNPARSED if "</think>" in reply.text else NO_THINKING}


async def bridge(runner: CaseRunner) -> CaseCells:
    """Two turns of one trajectory, the second of which the gateway sends as token ids."""
    free = await runner.ask(messages=[HELLO])
    grammar = None if _is_text(free) and free.replies[0].finish_reason == "stop" else {"choice": [PLAIN]}
    turn: dict[str, Any] = {"messages": [HELLO], "structured_outputs": grammar, "max_tokens": CALL_TOKENS}
    first, answers = await runner.continue_twice(turn, _next_turn)
    if not (first.is_sound and answers.whole.is_sound):
        return judge_only(answers.whole if first.is_sound else first)
    return await runner.judge(answers, prefix=judge_bridge(first.steps[0], answers.whole.steps[0]))


CASES: Mapping[str, Callable[[CaseRunner], Awaitable[CaseCells]]] = {
    "single turn": single_turn,
    "multi-turn": multi_turn,
    "tools": tools,
    "unicode": unicode,
    "several choices": several_choices,
    "stop string": stop_string,
    "completions": completions,
    "messages": messages,
    "responses": responses,
    "reasoning": reasoning,
    "bridge": bridge,
}
"""The cases in the order in which they are run and shown."""


def stop_within(text: str) -> str | None:
    """Two characters from the middle of a text, for a stop string."""
    pairs = (text[at : at + 2] for at in range(len(text) // 3, len(text) - 2))
    return next((pair for pair in pairs if REPLACEMENT not in pair and not pair.isspace()), None)


async def _text_turn(runner: CaseRunner) -> ExaminedAnswer:
    """An answer that can be sent back as text. An untrained model needs a grammar to write one."""
    free = await runner.ask(messages=[HELLO])
    if not free.is_sound or _is_text(free):
        return free
    return await runner.ask(messages=[HELLO], structured_outputs={"choice": [PLAIN]})


def _is_text(answer: ExaminedAnswer) -> bool:
    """Whether the reply can be sent back as it is."""
    return bool(answer.replies) and bool(answer.replies[0].text) and REPLACEMENT not in answer.replies[0].text


def _next_turn(reply: ParsedReply) -> dict[str, Any]:
    return {"messages": [HELLO, {"role": "assistant", "content": reply.text}, AGAIN]}


async def _prompt_fault(runner: CaseRunner, step: Step) -> Finding | None:
    decoded = await runner.gateway.decode(step.prompt_ids.tolist())
    if decoded is None or any(form in decoded.text for form in (UNICODE, unicodedata.normalize("NFC", UNICODE))):
        return None
    return Finding(Grade.FAULT, "the prompt's ids do not decode to the agent's text", "see the chat template")


def _same_start(free: Step, stopped: Step) -> bool:
    """Whether the engine repeated its answer. If it did not, the stop string need not have come."""
    shared = min(len(free.response_ids), len(stopped.response_ids))
    return first_difference(free.response_ids[:shared], stopped.response_ids[:shared]) is None


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


async def _forced_call(runner: CaseRunner, free: ExaminedAnswer) -> CaseCells:
    """vLLM samples choice i of a seed like a single choice of seed + i, so several seeds are tried in one call."""
    forced = {**REQUEST, "tool_choice": "required"}
    for attempt in range(TRIES):
        seed = SEED + attempt * CHOICES
        tried = await runner.ask(**{**forced, "n": CHOICES, "seed": seed})
        if not tried.is_sound:
            return judge_only(tried)
        if (found := calling_choice(tried)) is None:
            continue
        answers = await runner.ask_twice(**{**forced, "seed": seed + found})
        if (choice := calling_choice(answers.whole)) is not None:
            return await _judge_call(runner, answers, choice, rescored=GRAMMAR)
    why = f"the model completed no call within {CALL_TOKENS} tokens, in {TRIES * CHOICES} tries"
    return {**judge_only(free), CaseColumn.TEXT: Finding(Grade.UNKNOWN, why)}


async def _judge_call(runner: CaseRunner, answers: CaseAnswers, choice: int, *, rescored: Finding | None) -> CaseCells:
    whole, reply = answers.whole, answers.whole.replies[choice]
    following = await runner.ask(messages=[USER, *_history(reply)], tools=[FLAG])
    prefix = await runner.prefix(ExaminedAnswer(steps=whole.steps[choice : choice + 1]), following)
    cells = await runner.judge(answers, prefix=prefix, rescored=rescored)
    wrong = next((call for call in reply.tools if not _is_valid(call)), None)
    if wrong is None or cells[CaseColumn.TEXT].grade is Grade.FAULT:
        return cells
    what = f"the parsed call does not fit the tool: {wrong.name}({wrong.arguments})"
    return {**cells, CaseColumn.TEXT: Finding(Grade.FAULT, what, NO_PARSER)}


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
