"""The verdicts on an answer: one function per column. Pure: they compare the reply with the recorded steps.

An answer that did not arrive is a fault of its ids. The other columns are then unknown, so a fault is reported once.
"""

import json
from collections.abc import Mapping, Sequence

import numpy as np

from stepwell.doctor.findings import EXACT, NOTHING, Finding, Grade
from stepwell.doctor.replies import DecodedText, ExaminedAnswer, ParsedReply, ToolCall
from stepwell.gateway.bridge.recorded_turns import BridgeOutcome
from stepwell.steps.prefix_tree import common_prefix
from stepwell.steps.step import BRIDGED, RENDERED, Exactness, IntArray, Step
from stepwell.steps.trainable import fault_kind

TOLERANCE = 1e-3
"""Largest difference between sampled and rescored log-probabilities in float32."""
MEAN_GAP, LARGEST_GAP = 0.05, 1.0
"""Mean and largest difference in bfloat16. Larger ones mean log-probabilities of other tokens."""
SHOWN = 24
"""Characters shown of a text from the first difference."""
REPLACEMENT = "\ufffd"
LOGPROB_FAULTS = ("no_logprobs", "logprob_count", "bad_logprob")
"""Quarantine kinds that concern log-probabilities; all others concern ids."""
NO_IDS = "the server ignores return_token_ids: use vLLM 0.11 or newer, and no proxy that drops fields"
REMEDIES = {
    "no_prompt_ids": NO_IDS,
    "no_response_ids": NO_IDS,
    "prompt_count": "ids and usage must agree: is there a proxy that changes answers?",
    "response_count": "ids and usage must agree: is there a proxy that changes answers, or a parser that loses tokens?",
    "logprob_count": "some ids or log-probabilities are lost: try without tool and reasoning parsers",
    "no_logprobs": "start vLLM without --max-logprobs 0",
    "bad_logprob": "start vLLM with --logprobs-mode processed_logprobs; NaN and -9999 mean broken weights or kernels",
    "cut_short": "the engine stopped in the middle of an answer: see its log",
}
SEE_LOG = "see the engine's log; calls must succeed before they can be exact"
REPORT_US = "report it to Stepwell's developers, with the model and its chat template"
FORK = "steps stay exact, but each turn is trained as a row of its own"
NOT_BRIDGED = f"see docs/bridge.md; {FORK}"
TAKES_IDS = f"use vLLM 0.32 or newer, without a KV connector or a proxy that drops kv_transfer_params; {FORK}"
BRIDGE_REMEDIES: Mapping[str, str] = {
    BridgeOutcome.NO_RENDERER: "start vLLM 0.32 or newer with --enable-scale-out; the lines after Missing say more",
    BridgeOutcome.RENDER_FAILED: "start vLLM with --enable-scale-out; see its log",
    BridgeOutcome.UNPROVEN: "start vLLM with --enable-scale-out: its /tokenize gives other ids than its chat",
    BridgeOutcome.REFUSED: TAKES_IDS,
    BridgeOutcome.ECHO_DIFFERS: TAKES_IDS,
    BridgeOutcome.THINKING: "stepwell gateway --thinking tool_cycle or all keeps earlier thinking, and joins turns",
}
"""Instructions by the outcome of the bridge."""
GRAMMAR = Finding(
    Grade.UNKNOWN, "sampled under a grammar, which rescoring does not apply; such steps are marked untrainable"
)


def judge_ids(answer: ExaminedAnswer) -> Finding:
    if answer.failure:
        return Finding(Grade.FAULT, answer.failure, SEE_LOG)
    if len(answer.steps) != len(answer.replies):
        return Finding(Grade.FAULT, f"{len(answer.steps)} steps recorded of {len(answer.replies)} choices", SEE_LOG)
    for step in answer.steps:
        if step.quarantine is not None and fault_kind(step.quarantine) not in LOGPROB_FAULTS:
            return _quarantined(step.quarantine)
        if step.exactness is not Exactness.ENGINE:
            return Finding(Grade.FAULT, "encoded again from text: the engine returns no token ids", "use vLLM")
    return EXACT


def judge_logprobs(answer: ExaminedAnswer) -> Finding:
    faults = [step.quarantine for step in answer.steps if step.quarantine is not None]
    for fault in faults:
        if fault_kind(fault) in LOGPROB_FAULTS:
            return _quarantined(fault)
    if answer.failure or faults or any(step.response_logprobs is None for step in answer.steps):
        return NOTHING
    return EXACT


def judge_text(answer: ExaminedAnswer, *, stop: str = "", expected: str | None = None) -> Finding:
    """`stop` is the stop string, `expected` the only text that the grammar allows."""
    if judge_ids(answer).grade is Grade.FAULT:
        return NOTHING
    for reply, decoded in zip(answer.replies, answer.decoded, strict=True):
        if expected is not None and reply.text != expected:
            what = f"the grammar allows one text, but the engine wrote another: {difference(expected, reply.text)}"
            return Finding(Grade.FAULT, what)
        if decoded is None:
            return Finding(Grade.UNKNOWN, "the engine does not decode its tokens", "give --tokenizer-path")
        if fault := text_fault(reply, decoded, stop):
            return Finding(Grade.FAULT, fault, "ids and text are of different answers, or a proxy rewrites text")
    return EXACT


def judge_stream(
    whole: ExaminedAnswer, streamed: ExaminedAnswer, again: ExaminedAnswer | None, *, stop: str = ""
) -> Finding:
    """`again` is the whole answer a second time. It shows whether the engine is deterministic under a seed."""
    own = (judge_ids(streamed), judge_logprobs(streamed), judge_text(streamed, stop=stop))
    if fault := next((finding for finding in own if finding.grade is Grade.FAULT), None):
        return fault
    if not whole.is_sound:
        return NOTHING
    differs = differing(whole, streamed)
    if not differs:
        return judge_gaps(gaps_between(whole, streamed), "whole and streamed")
    if again is not None and differing(whole, again):
        what = f"the engine does not repeat an answer under a seed ({differs}); the stream itself is consistent"
        return Finding(Grade.UNKNOWN, what)
    return Finding(Grade.FAULT, f"the streamed answer is different: {differs}", "report it to the engine's developers")


def differing(one: ExaminedAnswer, other: ExaminedAnswer) -> str:
    """The first difference between two answers to one request; empty if there is none."""
    if len(one.steps) != len(other.steps):
        return f"{len(one.steps)} choices and {len(other.steps)}"
    for first, second in zip(one.steps, other.steps, strict=True):
        if (at := first_difference(first.prompt_ids, second.prompt_ids)) is not None:
            return f"prompts differ at token {at}"
        if (at := first_difference(first.response_ids, second.response_ids)) is not None:
            return f"responses differ at token {at}"
    if (gaps := judge_gaps(gaps_between(one, other), "the")).grade is Grade.FAULT:
        return gaps.what
    for first_reply, second_reply in zip(one.replies, other.replies, strict=True):
        if first_reply.text != second_reply.text:
            return f"texts differ: {difference(first_reply.text, second_reply.text)}"
        if first_reply.reasoning != second_reply.reasoning:
            return f"thoughts differ: {difference(first_reply.reasoning, second_reply.reasoning)}"
        if [_parsed(call) for call in first_reply.tools] != [_parsed(call) for call in second_reply.tools]:
            return "tool calls differ"
    return ""


def judge_as_chat(chat: ExaminedAnswer, again: ExaminedAnswer | None, answer: ExaminedAnswer) -> Finding:
    """Whether an answer in another dialect is that of the same request in chat, at temperature 0. `again` is the
    chat's answer a second time: it shows whether the engine repeats an answer at all."""
    if (prompt := judge_prompt(chat, answer)).grade is Grade.FAULT:
        return prompt
    differs = differing(chat, answer)
    if not differs or (again is not None and differing(chat, again)):
        return EXACT
    return Finding(Grade.FAULT, f"its answer differs from that of the same chat: {differs}", REPORT_US)


def judge_prompt(chat: ExaminedAnswer, answer: ExaminedAnswer) -> Finding:
    """Whether the prompt of an answer in another dialect is that of the same request in chat."""
    if not answer.is_sound:
        return judge_ids(answer)
    at = first_difference(chat.steps[0].prompt_ids, answer.steps[0].prompt_ids)
    if at is None:
        return EXACT
    return Finding(Grade.FAULT, f"its prompt differs from that of the same chat at token {at}", REPORT_US)


def judge_bridge(first: Step, second: Step) -> Finding:
    """Whether the second turn was sent as the tokens of the first and those of the new messages, and used as sent."""
    if second.prompt_made == BRIDGED:
        at = prefix_break(first, second)
        return EXACT if at is None else Finding(Grade.FAULT, f"the bridge lost the first turn at token {at}", REPORT_US)
    reason = second.prompt_made.removeprefix(f"{RENDERED}: ")
    what = f"the second turn was not sent as token ids: {reason}"
    return Finding(Grade.WARNING, what, BRIDGE_REMEDIES.get(reason, NOT_BRIDGED))


def judge_prefix(first: Step, second: Step, texts: tuple[str, str]) -> Finding:
    """`texts`: the first turn from the first difference on, and the second turn's prompt from there on."""
    at = prefix_break(first, second)
    if at is None:
        return EXACT
    where = "response" if at >= len(first.prompt_ids) else "prompt"
    within = at - len(first.prompt_ids) if where == "response" else at
    before, after = (repr(text[:SHOWN]) for text in texts)
    what = f"the next prompt differs from the first turn at token {within} of its {where}: {before} became {after}"
    return Finding(Grade.WARNING, what, f"{FORK}, unless the bridge joins them (see the case bridge)")


def prefix_break(first: Step, second: Step) -> int | None:
    """The first token of the first turn, prompt and response, that the second prompt does not repeat."""
    turn: IntArray = np.concatenate((first.prompt_ids, first.response_ids))
    return first_difference(turn, second.prompt_ids[: len(turn)])


def judge_rescored(answer: ExaminedAnswer, rescored: Sequence[list[float] | str]) -> Finding:
    if not answer.is_sound or any(step.response_logprobs is None for step in answer.steps):
        return NOTHING
    gaps = list[float]()
    for step, again in zip(answer.steps, rescored, strict=True):
        if isinstance(again, str):
            return Finding(Grade.UNKNOWN, f"the engine does not rescore: {again}")
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
        return Finding(Grade.WARNING, what, "half precision causes this; --dtype float32 is exact")
    return Finding(Grade.FAULT, what, "the reported values belong to other tokens, or the weights have changed")


def judge_mode(answer: ExaminedAnswer, rescored: Sequence[list[float] | str]) -> Finding:
    """Judges an answer at a temperature other than 1, where raw and processed log-probabilities differ."""
    finding = judge_rescored(answer, rescored)
    if finding.grade is Grade.EXACT:
        what = "raw: before temperature and top_p, so they are not those of the sampling distribution unless both are 1"
        return Finding(Grade.WARNING, what, "start vLLM with --logprobs-mode processed_logprobs")
    if finding.grade is Grade.UNKNOWN:
        return finding if finding.what else Finding(Grade.UNKNOWN, "could not be found out: see the table")
    return Finding(Grade.OK, "processed: those of the sampling distribution")


def text_fault(reply: ParsedReply, decoded: DecodedText, stop: str) -> str:
    """How the ids contradict the reply; empty if they do not."""
    if reply.tools or reply.reasoning:
        return _missing_part(reply, decoded.text)
    text = reply.text.lstrip(" ")
    ends = ("", decoded.end) if reply.finish_reason == "stop" else ("",)
    candidates = [form.lstrip(" ") for form in (decoded.text, decoded.bare) if form is not None]
    if any(_matches(candidate, text, ends, stop) for candidate in candidates):
        return ""
    return f"the ids do not decode to the text: {difference(candidates[0], text)}"


def difference(expected: str, found: str) -> str:
    at = next((i for i, (one, other) in enumerate(zip(expected, found, strict=False)) if one != other), None)
    at = min(len(expected), len(found)) if at is None else at
    return f"at character {at}, {expected[at : at + SHOWN]!r} became {found[at : at + SHOWN]!r}"


def first_difference(one: IntArray, other: IntArray) -> int | None:
    shared = common_prefix(one, other)
    return None if shared == len(one) == len(other) else shared


def _matches(decoded: str, text: str, ends: Sequence[str], stop: str) -> bool:
    rest = decoded.removeprefix(text) if decoded.startswith(text) else None
    stopped = bool(stop) and rest is not None and rest.startswith(stop)
    return rest in ends or stopped or _same_without_replacements(text, decoded, ends)


def _same_without_replacements(text: str, decoded: str, ends: Sequence[str]) -> bool:
    """Bytes that form no character are shown as U+FFFD, one for each or one for several. Engines and tokenizers differ
    in that although the tokens are the same."""
    bare = decoded.replace(REPLACEMENT, "")
    return REPLACEMENT in decoded and any(text.replace(REPLACEMENT, "") + end == bare for end in ends)


def _missing_part(reply: ParsedReply, decoded: str) -> str:
    """The part that the ids lack of a reply that the engine's parser has split: each part must be in the ids, in any
    syntax."""
    for text in (reply.text.strip(), reply.reasoning.strip()):
        if text not in decoded:
            return f"the ids do not decode to the text: {difference(decoded, text)}"
    folded = decoded.casefold()
    for call in reply.tools:
        for part in (call.name, *_leaves(_parsed(call))):
            if part.casefold() not in folded:
                where = f"{part!r} is not in {decoded[:80]!r}"
                return f"the ids do not contain the call {call.name}({call.arguments}): {where}"
    return ""


def _parsed(call: ToolCall) -> object:
    try:
        return (call.name, json.loads(call.arguments))
    except ValueError:
        return (call.name, call.arguments)


def _leaves(value: object) -> list[str]:
    """The names and values in a call's arguments, as text."""
    if isinstance(value, dict):
        return [text for name, inner in value.items() for text in (str(name), *_leaves(inner))]
    if isinstance(value, (list, tuple)):
        return [text for inner in value for text in _leaves(inner)]
    return [value if isinstance(value, str) else json.dumps(value)]


def gaps_between(one: ExaminedAnswer, other: ExaminedAnswer) -> list[float]:
    """Differences of the log-probabilities of two answers with the same tokens."""
    gaps = list[float]()
    for first, second in zip(one.steps, other.steps, strict=True):
        if first.response_logprobs is not None and second.response_logprobs is not None:
            gaps += np.abs(first.response_logprobs - second.response_logprobs).tolist()
    return gaps


def _quarantined(fault: str) -> Finding:
    return Finding(Grade.FAULT, fault, REMEDIES.get(fault_kind(fault), SEE_LOG))
