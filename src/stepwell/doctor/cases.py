"""The cases: what agents do. The case with tools is in tool_case.py."""

import unicodedata
from collections.abc import Awaitable, Callable, Mapping

from stepwell.doctor.case_runner import HELLO, CaseRunner, first_answer_row
from stepwell.doctor.findings import CaseColumn, CaseRow, Finding, Grade
from stepwell.doctor.harness import COMPLETIONS
from stepwell.doctor.replies import ExaminedAnswer
from stepwell.doctor.tool_case import tools
from stepwell.doctor.verdicts import GRAMMAR, REPLACEMENT, first_difference
from stepwell.steps.step import Step

UNICODE = "naïve ☕ 日本語 𝄞 👩‍🚀 cafe\u0301"
"""Characters of two, three and four bytes, one joined from three others, and one in decomposed form."""
UNICODE_TOKENS = 128
"""Enough for this text with one token per byte."""
PLAIN = "Good, thank you."


async def single_turn(runner: CaseRunner) -> CaseRow:
    return await runner.row("single turn", await runner.ask_twice(messages=[HELLO]))


async def multi_turn(runner: CaseRunner) -> CaseRow:
    first = await _text_turn(runner)
    if not first.is_sound:
        return first_answer_row("multi-turn", first)
    said = {"role": "assistant", "content": first.replies[0].text}
    answers = await runner.ask_twice(messages=[HELLO, said, {"role": "user", "content": "And again?"}])
    return await runner.row("multi-turn", answers, prefix=await runner.prefix(first, answers.whole))


async def unicode(runner: CaseRunner) -> CaseRow:
    """A grammar allows only one text, so every model writes it."""
    request = {"role": "user", "content": f"Repeat: {UNICODE}"}
    grammar = {"choice": [UNICODE]}
    answers = await runner.ask_twice(messages=[request], structured_outputs=grammar, max_tokens=UNICODE_TOKENS)
    row = await runner.row("unicode", answers, expected=UNICODE, rescored=GRAMMAR)
    if answers.whole.is_sound and (fault := await _prompt_fault(runner, answers.whole.steps[0])) is not None:
        return row.with_cell(CaseColumn.TEXT, fault)
    return row


async def several_choices(runner: CaseRunner) -> CaseRow:
    return await runner.row("several choices", await runner.ask_twice(messages=[HELLO], n=3))


async def stop_string(runner: CaseRunner) -> CaseRow:
    """The answer of the single turn, stopped by a string that it contains."""
    free = await runner.ask(messages=[HELLO])
    stop = stop_within(free.replies[0].text if free.replies else "")
    if not free.is_sound or stop is None:
        return first_answer_row("stop string", free)
    answers = await runner.ask_twice(messages=[HELLO], stop=[stop])
    row = await runner.row("stop string", answers, stop=stop)
    unstopped = any(stop in reply.text or reply.finish_reason != "stop" for reply in answers.whole.replies)
    if unstopped and answers.whole.is_sound and _same_start(free.steps[0], answers.whole.steps[0]):
        fault = Finding(Grade.FAULT, f"the stop string {stop!r} did not end the answer", "does a proxy drop stop?")
        return row.with_cell(CaseColumn.TEXT, fault)
    return row


async def completions(runner: CaseRunner) -> CaseRow:
    return await runner.row("completions", await runner.ask_twice(COMPLETIONS, prompt="Once upon a time"))


CASES: Mapping[str, Callable[[CaseRunner], Awaitable[CaseRow]]] = {
    "single turn": single_turn,
    "multi-turn": multi_turn,
    "tools": tools,
    "unicode": unicode,
    "several choices": several_choices,
    "stop string": stop_string,
    "completions": completions,
}
"""In the order in which they are run and shown."""


def stop_within(text: str) -> str | None:
    """Two characters from the middle of a text, for a stop string."""
    pairs = (text[at : at + 2] for at in range(len(text) // 3, len(text) - 2))
    return next((pair for pair in pairs if REPLACEMENT not in pair and not pair.isspace()), None)


async def _text_turn(runner: CaseRunner) -> ExaminedAnswer:
    """An answer that can be sent back as text. An untrained model needs a grammar to write one."""
    free = await runner.ask(messages=[HELLO])
    if not free.is_sound or (free.replies[0].text and REPLACEMENT not in free.replies[0].text):
        return free
    return await runner.ask(messages=[HELLO], structured_outputs={"choice": [PLAIN]})


async def _prompt_fault(runner: CaseRunner, step: Step) -> Finding | None:
    decoded = await runner.harness.decode(step.prompt_ids.tolist())
    if decoded is None or any(form in decoded.text for form in (UNICODE, unicodedata.normalize("NFC", UNICODE))):
        return None
    return Finding(Grade.FAULT, "the prompt's ids do not decode to the agent's text", "see the chat template")


def _same_start(free: Step, stopped: Step) -> bool:
    """Whether the engine repeated its answer. If it did not, the stop string need not have come."""
    shared = min(len(free.response_ids), len(stopped.response_ids))
    return first_difference(free.response_ids[:shared], stopped.response_ids[:shared]) is None
