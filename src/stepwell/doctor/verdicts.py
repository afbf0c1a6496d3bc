"""The verdicts on an answer, one function a column. Pure: they see what was told and what was recorded.

An answer that did not come is the fault of its ids; the other columns are then untold, so that a fault is named once.
"""

from collections.abc import Sequence

import numpy as np

from stepwell.doctor.answer import Answer
from stepwell.doctor.findings import EXACT, NOTHING, Finding, Mark
from stepwell.doctor.texts import SHOWN, difference, misspelled, parsed
from stepwell.steps.soundness import fault_kind
from stepwell.steps.step import Exactness, IntArray, Step

TOLERANCE = 1e-3
"""How far float32 may be off between sampling and rescoring."""
MEAN_GAP, LARGEST_GAP = 0.05, 1.0
"""How far bfloat16 may be off, on average and at worst; beyond, they are not the log-probabilities of these tokens."""
OF_LOGPROBS = ("no_logprobs", "logprob_count", "bad_logprob")
"""Quarantines that speak of log-probabilities; all others speak of ids."""
NO_IDS = "the server does not obey return_token_ids: use vLLM 0.11 or newer, with nothing between that drops fields"
REMEDIES = {
    "no_prompt_ids": NO_IDS,
    "no_response_ids": NO_IDS,
    "prompt_count": "ids and usage must agree: is there a proxy that changes answers?",
    "response_count": "ids and usage must agree: is there a proxy that changes answers, or a parser that loses tokens?",
    "logprob_count": "some ids or log-probabilities are lost on the way: try without tool and reasoning parsers",
    "no_logprobs": "start vLLM without --max-logprobs 0",
    "bad_logprob": "start vLLM with --logprobs-mode processed_logprobs; NaN and -9999 mean broken weights or kernels",
    "cut_short": "the engine gave up in mid-answer: its log says why",
}
SEE_LOG = "see the engine's log; calls must succeed before they can be exact"
FORK = "steps stay exact, but turns are trained as rows of their own"
GRAMMAR = Finding(
    Mark.UNTOLD, "written under a grammar, which rescoring does not know; such steps are marked untrainable"
)


def judge_ids(answer: Answer) -> Finding:
    if answer.failure:
        return Finding(Mark.FAULT, answer.failure, SEE_LOG)
    if len(answer.steps) != len(answer.heard):
        return Finding(Mark.FAULT, f"{len(answer.steps)} steps recorded of {len(answer.heard)} choices", SEE_LOG)
    for step in answer.steps:
        if step.quarantine is not None and fault_kind(step.quarantine) not in OF_LOGPROBS:
            return _quarantined(step.quarantine)
        if step.exactness is not Exactness.ENGINE:
            return Finding(Mark.FAULT, "encoded again from text: the engine gives no token ids", "use vLLM")
    return EXACT


def judge_logprobs(answer: Answer) -> Finding:
    faults = [step.quarantine for step in answer.steps if step.quarantine is not None]
    for fault in faults:
        if fault_kind(fault) in OF_LOGPROBS:
            return _quarantined(fault)
    if answer.failure or faults or any(step.response_logprobs is None for step in answer.steps):
        return NOTHING
    return EXACT


def judge_text(answer: Answer, *, stop: str = "", expected: str | None = None) -> Finding:
    """`stop` is a text that ended it, `expected` the only text that it could be."""
    if judge_ids(answer).mark is Mark.FAULT:
        return NOTHING
    for heard, spelled in zip(answer.heard, answer.spelled, strict=True):
        if expected is not None and heard.text != expected:
            return Finding(Mark.FAULT, f"held to one text, the engine told another: {difference(expected, heard.text)}")
        if spelled is None:
            return Finding(Mark.UNTOLD, "the engine does not say what its tokens spell", "give --tokenizer-path")
        if fault := misspelled(heard, spelled, stop):
            return Finding(Mark.FAULT, fault, "ids and text are of different answers, or a proxy rewrites text")
    return EXACT


def judge_stream(whole: Answer, streamed: Answer, again: Answer | None, *, stop: str = "") -> Finding:
    """`again` is the whole answer once more, asked for where the two differ: does the engine repeat itself at all?"""
    own = (judge_ids(streamed), judge_logprobs(streamed), judge_text(streamed, stop=stop))
    if fault := next((finding for finding in own if finding.mark is Mark.FAULT), None):
        return fault
    if not whole.is_sound:
        return NOTHING
    differs = differing(whole, streamed)
    if not differs:
        return judge_gaps(_gaps_between(whole, streamed), "whole and streamed")
    if again is not None and differing(whole, again):
        return Finding(
            Mark.UNTOLD,
            f"the engine does not repeat itself under a seed ({differs}); by itself the stream adds up",
        )
    return Finding(Mark.FAULT, f"streamed, it is another answer: {differs}", "report it to the engine's makers")


def differing(one: Answer, other: Answer) -> str:
    """What two answers to one request differ in; empty if in nothing."""
    if len(one.steps) != len(other.steps):
        return f"{len(one.steps)} choices and {len(other.steps)}"
    for first, second in zip(one.steps, other.steps, strict=True):
        if (at := first_difference(first.prompt_ids, second.prompt_ids)) is not None:
            return f"prompts differ at token {at}"
        if (at := first_difference(first.response_ids, second.response_ids)) is not None:
            return f"tokens differ from the {at + 1}. on"
    if (gaps := judge_gaps(_gaps_between(one, other), "the")).mark is Mark.FAULT:
        return gaps.what
    for told, retold in zip(one.heard, other.heard, strict=True):
        if told.text != retold.text:
            return f"texts differ: {difference(told.text, retold.text)}"
        if [parsed(call) for call in told.tools] != [parsed(call) for call in retold.tools]:
            return "tool calls differ"
    return ""


def judge_prefix(first: Step, second: Step, spelled: tuple[str, str]) -> Finding:
    """`spelled`: how the first turn goes on from the first difference, and how the second turn's prompt has it."""
    at = prefix_break(first, second)
    if at is None:
        return EXACT
    where = "response" if at >= len(first.prompt_ids) else "prompt"
    within = at - len(first.prompt_ids) if where == "response" else at
    before, after = (repr(text[:SHOWN]) for text in spelled)
    what = f"the next prompt leaves the first turn at token {within} of its {where}: {before} became {after}"
    return Finding(Mark.WARNING, what, FORK)


def prefix_break(first: Step, second: Step) -> int | None:
    """The token of the first turn, prompt and response, that the second prompt does not repeat; None if it does all."""
    turn: IntArray = np.concatenate((first.prompt_ids, first.response_ids))
    return first_difference(turn, second.prompt_ids[: len(turn)])


def judge_rescored(answer: Answer, rescored: Sequence[list[float] | str]) -> Finding:
    if not answer.is_sound or any(step.response_logprobs is None for step in answer.steps):
        return NOTHING
    gaps = list[float]()
    for step, again in zip(answer.steps, rescored, strict=True):
        if isinstance(again, str):
            return Finding(Mark.UNTOLD, f"the engine does not rescore: {again}")
        assert step.response_logprobs is not None
        gaps += np.abs(step.response_logprobs - np.asarray(again, np.float32)).tolist()
    return judge_gaps(gaps)


def judge_gaps(gaps: Sequence[float], between: str = "sampled and rescored") -> Finding:
    largest = max(gaps, default=0.0)
    if largest <= TOLERANCE:
        return EXACT
    mean = sum(gaps) / len(gaps)
    what = f"{between} log-probabilities are {mean:.2g} apart on average, {largest:.2g} at most"
    if mean <= MEAN_GAP and largest <= LARGEST_GAP:
        return Finding(Mark.WARNING, what, "that is the grain of half precision; --dtype float32 would be exact")
    return Finding(Mark.FAULT, what, "what is reported does not belong to these tokens, or the weights have changed")


def _gaps_between(one: Answer, other: Answer) -> list[float]:
    """Of two answers with the same tokens."""
    gaps = list[float]()
    for first, second in zip(one.steps, other.steps, strict=True):
        if first.response_logprobs is not None and second.response_logprobs is not None:
            gaps += np.abs(first.response_logprobs - second.response_logprobs).tolist()
    return gaps


def first_difference(one: IntArray, other: IntArray) -> int | None:
    shared = min(len(one), len(other))
    differs = np.flatnonzero(one[:shared] != other[:shared])
    if len(differs):
        return int(differs[0])
    return None if len(one) == len(other) else shared


def _quarantined(fault: str) -> Finding:
    return Finding(Mark.FAULT, fault, REMEDIES.get(fault_kind(fault), SEE_LOG))


def judge_mode(answer: Answer, rescored: Sequence[list[float] | str]) -> Finding:
    """Of an answer at another temperature than 1: what the model gives is then not what was sampled from."""
    finding = judge_rescored(answer, rescored)
    if finding.mark is Mark.EXACT:
        what = "raw: as before temperature and top_p, so not of what was sampled from unless both are 1"
        return Finding(Mark.WARNING, what, "start vLLM with --logprobs-mode processed_logprobs")
    if finding.mark is Mark.UNTOLD:
        return finding if finding.what else Finding(Mark.UNTOLD, "could not be found out: see the table")
    return Finding(Mark.OK, "processed: of what was sampled from")
