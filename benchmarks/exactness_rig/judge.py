"""What is wrong with a recorded conversation, if anything is: every step is compared with what the engine was asked and
sampled, and every prompt with the engine's own rendering of the whole script."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
from stepwell.gateway.bridge.recorded_turns import BridgeOutcome

from benchmarks.bridge_rig.talk import Message
from benchmarks.exactness_rig.clients import Heard
from benchmarks.exactness_rig.conversations import Conversation, Exchange
from benchmarks.exactness_rig.exactness_tables import EXACT
from stepwell.steps.columns import pack
from stepwell.steps.rows import merge_rows
from stepwell.steps.step import BRIDGED, RENDERED, Exactness, Step

FIRST = f"{RENDERED}: {BridgeOutcome.FIRST_TURN}"
TEMPLATES_DOING = frozenset(
    f"{RENDERED}: {outcome}"
    for outcome in (
        *(BridgeOutcome.THINKING, BridgeOutcome.HEAD_CHANGES, BridgeOutcome.NOT_ANCHORED),
        *(BridgeOutcome.CLOSE_DIFFERS, BridgeOutcome.RENDER_FAILED),
    )
)
"""Reasons that lie in the chat template. These agents send back what they got, so that no other one is right."""
NOT_RENDERED = "not rendered"


def outcome_of(talk: Conversation) -> str:
    """`exact` if every turn continues the tokens of the one before; otherwise why one does not."""
    if talk.refusal:
        return f"refused: {NOT_RENDERED}"
    reasons = dict.fromkeys(step.prompt_made for step in talk.steps[1:] if step.prompt_made != BRIDGED)
    return "refused: " + ", ".join(reason.removeprefix(f"{RENDERED}: ") for reason in reasons) if reasons else EXACT


def faults_of(talk: Conversation, tolerance: float = 0.0) -> list[str]:
    """`tolerance` is how much log-probabilities may differ."""
    answered = [exchange for exchange in talk.exchanges if exchange.heard is not None]
    if len(talk.steps) != len(answered):
        return [f"{len(talk.steps)} steps of {len(answered)} calls"]
    faults: list[str] = []
    for place, (exchange, step) in enumerate(zip(answered, talk.steps, strict=True)):
        found = [*_heard(exchange), *_recorded(exchange, step, tolerance)]
        faults += [f"call {place + 1}: {fault}" for fault in found]
    if answered and not faults:
        faults += _prompts(answered, talk.steps) + _rows(talk.steps)
    if talk.refusal and talk.exchanges[-1].whole_prompt is not None:
        faults.append(f"an error, though the template renders the messages: {talk.refusal}")
    return faults


def differences(whole: Conversation, streamed: Conversation, tolerance: float = 0.0) -> list[str]:
    """Between the same conversation whole and streamed. If the engine's own parsers read streamed replies otherwise, or
    give other ids to tool calls, there is nothing to compare."""
    if any(one.served != other.served for one, other in zip(whole.exchanges, streamed.exchanges, strict=False)):
        return []
    if len(whole.steps) != len(streamed.steps):
        return ["streamed, it has another number of steps"]
    pairs = zip(whole.exchanges, streamed.exchanges, strict=True)
    faults = ["streamed, the agent gets another reply"] if any(a.heard != b.heard for a, b in pairs) else []
    for one, other in zip(whole.steps, streamed.steps, strict=True):
        faults += [f"streamed, a step has another {name}" for name in _differing(one, other, tolerance)]
    return list(dict.fromkeys(faults))


def _differing(one: Step, other: Step, tolerance: float) -> Iterator[str]:
    if not np.array_equal(one.prompt_ids, other.prompt_ids):
        yield "prompt"
    if not np.array_equal(one.response_ids, other.response_ids):
        yield "response"
    elif not _close(one.response_logprobs, other.response_logprobs, tolerance):
        yield "log-probability"
    for name in ("prompt_made", "finish_reason", "exactness", "untrainable", "sampling"):
        if getattr(one, name) != getattr(other, name):
            yield name


def _heard(exchange: Exchange) -> Iterator[str]:
    served, scripted = _as_heard(exchange.served), _as_heard(exchange.turn.reply.message)
    if exchange.heard != served:
        yield f"the agent gets {exchange.heard}, and the engine served {served}"
    if (served.text.strip(), served.reasoning.strip(), served.calls) != (
        scripted.text,
        scripted.reasoning,
        scripted.calls,
    ):
        yield f"the engine served {served} instead of {scripted}"


def _as_heard(message: Message) -> Heard:
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = tuple((one["name"], orjson.loads(one["arguments"])) for one in functions)
    return Heard(message.get("content") or "", message.get("reasoning") or "", calls)


def _recorded(exchange: Exchange, step: Step, tolerance: float) -> Iterator[str]:
    if len(exchange.sampled) != 1:
        yield f"the engine sampled {len(exchange.sampled)} times"
        return
    (sampled,) = exchange.sampled
    if step.prompt_ids.tolist() != sampled.prompt_ids:
        yield "the step has another prompt than the engine was sent"
    if step.response_ids.tolist() != sampled.response_ids:
        yield "the step has another response than the engine sampled"
    elif not _close(step.response_logprobs, sampled.logprobs, tolerance):
        yield "the step has other log-probabilities than the engine"
    if step.exactness is not Exactness.ENGINE:
        yield f"the step's exactness is {step.exactness.name}"
    if step.quarantine is not None:
        yield f"the step is in quarantine: {step.quarantine}"


def _close(some: Any, other: Any, tolerance: float) -> bool:
    if some is None or other is None or len(some) != len(other):
        return False
    return bool(np.allclose(np.float32(some), np.float32(other), rtol=0, atol=tolerance))


def _prompts(exchanges: Sequence[Exchange], steps: Sequence[Step]) -> list[str]:
    """Of a conversation whose steps are what the engine had."""
    faults = [] if steps[0].prompt_made == FIRST else [f"the first prompt was {steps[0].prompt_made}"]
    for exchange, step in zip(exchanges, steps, strict=True):
        if step.prompt_made != BRIDGED and step.prompt_ids.tolist() != exchange.whole_prompt:
            faults.append("the engine was sent another conversation")
    for parent, (exchange, step) in zip(steps, list(zip(exchanges, steps, strict=True))[1:], strict=False):
        if step.prompt_made == BRIDGED:
            faults += _bridged(parent, exchange, step)
        elif step.prompt_made not in TEMPLATES_DOING:
            faults.append(f"the prompt was {step.prompt_made}")
    return faults


def _bridged(parent: Step, exchange: Exchange, step: Step) -> Iterator[str]:
    tokens = [*parent.prompt_ids.tolist(), *parent.response_ids.tolist()]
    prompt = step.prompt_ids.tolist()
    if prompt[: len(tokens)] != tokens:
        yield "the prompt does not begin with the tokens of the turn before"
    new = prompt[len(tokens) :]
    if not new or exchange.whole_prompt is None or exchange.whole_prompt[-len(new) :] != new:
        yield "the engine renders the new messages in another way"


def _rows(steps: Sequence[Step]) -> list[str]:
    """Each sampled token is trained once, in a sequence that the engine had."""
    rows = merge_rows(pack(steps), np.zeros(len(steps), np.int64), np.zeros(1, np.int64))
    faults = []
    if int(rows.loss_mask.sum()) != sum(len(step.response_ids) for step in steps):
        faults.append("not every sampled token is trained once")
    had = {(*step.prompt_ids.tolist(), *step.response_ids.tolist()) for step in steps}
    if any(tuple(rows.tokens[start:end].tolist()) not in had for start, end in pairwise(rows.offsets_R)):
        faults.append("a row is no sequence that the engine had")
    if len(rows.trajectory_of_R) > 1 and all(step.prompt_made == BRIDGED for step in steps[1:]):
        faults.append(f"bridged turns become {len(rows.trajectory_of_R)} rows")
    return faults
