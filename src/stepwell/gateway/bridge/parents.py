"""Which recorded step a request continues.

A step is the parent if the request begins with exactly its messages and its reply as it was served. No other assistant
message may follow, so the reply is the last assistant message of the request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepwell.gateway.bridge.digests import ConversationDigest, RequestDigest
from stepwell.gateway.bridge.recorded_turns import BridgeOutcome, CannotBridge
from stepwell.steps.step import IntArray

ENDS = ("stop", "tool_calls")
"""The finish_reasons of replies that came to their own end."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A recorded step, as far as a later call needs it."""

    uid: str
    tokens: IntArray
    """The tokens of its prompt and its response."""
    finish_reason: str | None
    conversation_digest: ConversationDigest
    others: tuple[str, ...] = ()
    """The uids of the other choices of its call."""


def continued_turns(turns: Sequence[Turn], request: RequestDigest) -> list[Turn]:
    return [turn for turn in turns if turn.conversation_digest.replied == request.replied]


def find_parent(turns: Sequence[Turn], request: RequestDigest, echoed: Sequence[str] = ()) -> Turn:
    """The parent among the recorded turns of a trajectory, or CannotBridge.

    `echoed` are the uids of steps that the request sends back sealed; they decide between turns that look alike.
    """
    fitting = continued_turns(turns, request)
    if not fitting:
        is_edited = any(turn.conversation_digest.asked == request.asked or turn.uid in echoed[-1:] for turn in turns)
        raise CannotBridge(BridgeOutcome.EDITED if is_edited else BridgeOutcome.NO_PARENT)
    fitting = _those(
        fitting, [turn.conversation_digest.tools == request.tools for turn in fitting], BridgeOutcome.TOOLS_CHANGED
    )
    is_same = [turn.conversation_digest.template == request.template for turn in fitting]
    fitting = _those(fitting, is_same, BridgeOutcome.TEMPLATE_CHANGED)
    fitting = _those(fitting, [_thinks_alike(turn, request) for turn in fitting], BridgeOutcome.EDITED)
    parent = _only_one([turn for turn in fitting if turn.uid in echoed] or fitting)
    if parent.finish_reason not in ENDS or not len(parent.tokens):
        raise CannotBridge(BridgeOutcome.CUT_SHORT)
    return parent


def _those(turns: Sequence[Turn], wanted: Sequence[bool], otherwise: BridgeOutcome) -> list[Turn]:
    kept = [turn for turn, is_wanted in zip(turns, wanted, strict=True) if is_wanted]
    if not kept:
        raise CannotBridge(otherwise)
    return kept


def _thinks_alike(turn: Turn, request: RequestDigest) -> bool:
    """The request has no thinking that the step did not have; it may leave some out."""
    sent = ((place, thought) for place, thought in request.thoughts.items() if place <= request.reply_at)
    return all(turn.conversation_digest.thoughts.get(place) == thought for place, thought in sent)


def _only_one(turns: Sequence[Turn]) -> Turn:
    """Turns with the same tokens are as good as one."""
    if any(not np.array_equal(turn.tokens, turns[0].tokens) for turn in turns[1:]):
        raise CannotBridge(BridgeOutcome.AMBIGUOUS)
    return turns[0]
