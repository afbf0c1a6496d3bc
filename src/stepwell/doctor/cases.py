"""The cases: what agents do. The case of the tools is in tool_case.py."""

import unicodedata
from collections.abc import Awaitable, Callable, Mapping

from stepwell.doctor.answer import Answer
from stepwell.doctor.case_runner import HELLO, Asking, recorded_only
from stepwell.doctor.findings import Column, Finding, Mark, Row
from stepwell.doctor.tool_case import tools
from stepwell.doctor.verdicts import GRAMMAR, first_difference
from stepwell.steps.step import Step
from stepwell.wire.openai import Upstream

UNICODE = "naïve ☕ 日本語 𝄞 👩‍🚀 cafe\u0301"
"""Characters of two, three and four bytes, one made of three others, and one of two that Unicode could join."""
LONG_ENOUGH = 128
"""Tokens for it, even at one a byte."""
PLAIN = "Good, thank you."
HALF = "\ufffd"
"""Stands in a text for bytes that are no character."""


async def single_turn(asking: Asking) -> Row:
    return await asking.row("single turn", await asking.ask_twice(messages=[HELLO]))


async def multi_turn(asking: Asking) -> Row:
    first = await _plain_turn(asking)
    if not first.is_sound:
        return recorded_only("multi-turn", first)
    said = {"role": "assistant", "content": first.heard[0].text}
    asked = await asking.ask_twice(messages=[HELLO, said, {"role": "user", "content": "And again?"}])
    return await asking.row("multi-turn", asked, prefix=await asking.prefix(first, asked.whole))


async def unicode(asking: Asking) -> Row:
    """The engine is held to one text, so that any model writes it."""
    wish = {"role": "user", "content": f"Repeat: {UNICODE}"}
    held = {"choice": [UNICODE]}
    asked = await asking.ask_twice(messages=[wish], structured_outputs=held, max_tokens=LONG_ENOUGH)
    row = await asking.row("unicode", asked, expected=UNICODE, rescored=GRAMMAR)
    if asked.whole.is_sound and (fault := await _misread(asking, asked.whole.steps[0])) is not None:
        return row.with_cell(Column.TEXT, fault)
    return row


async def several_choices(asking: Asking) -> Row:
    return await asking.row("several choices", await asking.ask_twice(messages=[HELLO], n=3))


async def stop_string(asking: Asking) -> Row:
    """The answer of the single turn, stopped by something that it is known to say."""
    free = await asking.ask(messages=[HELLO])
    stop = stop_within(free.heard[0].text if free.heard else "")
    if not free.is_sound or stop is None:
        return recorded_only("stop string", free)
    asked = await asking.ask_twice(messages=[HELLO], stop=[stop])
    row = await asking.row("stop string", asked, stop=stop)
    unstopped = any(stop in heard.text or heard.finish_reason != "stop" for heard in asked.whole.heard)
    if unstopped and asked.whole.is_sound and _same_start(free.steps[0], asked.whole.steps[0]):
        fault = Finding(Mark.FAULT, f"the stop string {stop!r} did not end the answer", "does a proxy drop stop?")
        return row.with_cell(Column.TEXT, fault)
    return row


async def completions(asking: Asking) -> Row:
    return await asking.row("completions", await asking.ask_twice(Upstream.COMPLETIONS, prompt="Once upon a time"))


CASES: Mapping[str, Callable[[Asking], Awaitable[Row]]] = {
    "single turn": single_turn,
    "multi-turn": multi_turn,
    "tools": tools,
    "unicode": unicode,
    "several choices": several_choices,
    "stop string": stop_string,
    "completions": completions,
}
"""In the order in which they are asked and shown."""


def stop_within(text: str) -> str | None:
    """Two characters from the middle of a text, to stop it by."""
    pairs = (text[at : at + 2] for at in range(len(text) // 3, len(text) - 2))
    return next((pair for pair in pairs if HALF not in pair and not pair.isspace()), None)


async def _plain_turn(asking: Asking) -> Answer:
    """An answer that can be sent back as text. A model that was never trained writes none of its own will."""
    free = await asking.ask(messages=[HELLO])
    if not free.is_sound or (free.heard[0].text and HALF not in free.heard[0].text):
        return free
    return await asking.ask(messages=[HELLO], structured_outputs={"choice": [PLAIN]})


async def _misread(asking: Asking, step: Step) -> Finding | None:
    spelled = await asking.bench.spell(step.prompt_ids.tolist())
    if spelled is None or any(form in spelled.text for form in (UNICODE, unicodedata.normalize("NFC", UNICODE))):
        return None
    return Finding(Mark.FAULT, "the prompt's ids do not spell what the agent wrote", "see the chat template")


def _same_start(free: Step, stopped: Step) -> bool:
    """Whether the engine repeated itself as far as both go: else the stop string need not have come at all."""
    shared = min(len(free.response_ids), len(stopped.response_ids))
    return first_difference(free.response_ids[:shared], stopped.response_ids[:shared]) is None
