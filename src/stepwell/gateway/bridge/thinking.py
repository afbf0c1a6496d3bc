"""The part of its own earlier thinking that a model sees, and where the thinking of a conversation is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stepwell.gateway.bridge.digests import END_OF_THINKING, THINK_END, RequestDigest
from stepwell.gateway.bridge.recorded_turns import BridgeOutcome, CannotBridge, Turn


class ThinkingPolicy(StrEnum):
    TEMPLATE = "template"
    """The model sees what the chat template shows of what the client sends."""
    TOOL_CYCLE = "tool_cycle"
    """All of it until the user's next message."""
    ALL = "all"


@dataclass(frozen=True, slots=True)
class ThinkingPlaces:
    """Which assistant messages have thinking. A chat template may treat each of these places in its own way."""

    in_reply: bool = False
    earlier_turns: bool = False
    """There is thinking before the user's last message."""
    this_turn: bool = False
    """There is thinking after the user's last message, before the reply."""
    is_inline: bool = False
    """Some of it is part of the content, between <think> and </think>."""

    def __bool__(self) -> bool:
        return self.in_reply or self.earlier_turns or self.this_turn


NO_THINKING = ThinkingPlaces()


def thinking_to_prove(
    policy: ThinkingPolicy, parent: Turn, request: RequestDigest, messages: Sequence[Mapping[str, Any]]
) -> ThinkingPlaces:
    """The thinking of which the chat template must show as much as the bridge would; CannotBridge if that is known
    already."""
    thoughts = parent.conversation_digest.thoughts
    if not thoughts or policy is ThinkingPolicy.ALL:
        return NO_THINKING
    if policy is ThinkingPolicy.TOOL_CYCLE:
        if any(message["role"] == "user" for message in messages[request.reply_at + 1 :]):
            raise CannotBridge(BridgeOutcome.THINKING)
        return NO_THINKING
    inline = set(END_OF_THINKING).intersection(thoughts.values())
    if any(place not in request.thoughts for place in thoughts) or inline - {THINK_END}:
        raise CannotBridge(BridgeOutcome.THINKING)
    last_user = max((at for at in range(request.reply_at) if messages[at]["role"] == "user"), default=-1)
    return ThinkingPlaces(
        in_reply=request.reply_at in thoughts,
        earlier_turns=any(place < last_user for place in thoughts),
        this_turn=any(last_user < place < request.reply_at for place in thoughts),
        is_inline=bool(inline),
    )
