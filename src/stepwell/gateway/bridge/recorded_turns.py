"""The recorded turns of a trajectory: which of them a request continues, or why it continues none.

- A step is the parent if the request begins with exactly its messages and its reply as it was served. No other
  assistant message may follow, so the reply is the last assistant message of the request.
- The gateway remembers the turns of the trajectories that it served last, within a bound of bytes. A turn that
  continues another one shares its array: a conversation costs its final length, not the square of its turns. So does
  one that was rendered anew, if it begins with the tokens of the turn before it.
- Every outcome but BRIDGED is a plain re-render.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from stepwell.gateway.bridge.digests import END_OF_THINKING, THINK_END, ConversationDigest, RequestDigest
from stepwell.steps.step import IntArray

ENDS = ("stop", "tool_calls")
"""The finish_reasons of replies that came to their own end."""
MAX_BYTES = 256 * 2**20
OVERHEAD = 600
"""About the bytes of a turn without its tokens."""


class BridgeOutcome(StrEnum):
    BRIDGED = "bridged"
    FIRST_TURN = "first_turn"
    """The request has no assistant message: there is nothing to continue."""
    NO_PARENT = "no_parent"
    """No recorded step has these messages and this reply."""
    EDITED = "edited"
    """A recorded step has these messages, but its reply or its thinking was another one."""
    AMBIGUOUS = "ambiguous"
    """Several steps with different tokens fit."""
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE_CHANGED = "template_changed"
    """The engine's chat template or the fields for it are others."""
    CUT_SHORT = "cut_short"
    """The reply did not come to its own end, because of max_tokens, for example."""
    NO_TAIL = "no_tail"
    """The request ends with the reply."""
    TAIL_ROLE = "tail_role"
    """A message after the reply is neither of a tool, nor of a user, nor of the system."""
    MEDIA = "media"
    """A message has other content than text, which engines render themselves."""
    OPTIONS = "options"
    """The request changes how its prompt is rendered, as by continue_final_message."""
    THINKING = "thinking"
    """The model would see thinking that the setting `thinking` leaves out."""
    NOT_ANCHORED = "not_anchored"
    """The chat template does not show the reply, or not what follows it, so the new part cannot be cut out."""
    HEAD_CHANGES = "head_changes"
    """The chat template renders the earlier messages in another way when these messages follow."""
    CLOSE_DIFFERS = "close_differs"
    """The reply does not end in the token with which the chat template ends a reply."""
    NO_RENDERER = "no_renderer"
    """No engine renders without generating and takes ids, or the engines have different chat templates."""
    UNPROVEN = "unproven"
    """The engine's tokenize route gives other ids than the engine used."""
    RENDER_FAILED = "render_failed"
    POOL_AWAY = "pool_away"
    OTHER_ENGINE = "other_engine"
    """The call went to an engine with another chat template."""
    REFUSED = "refused"
    """The engine refused the ids, and got the messages instead."""
    ECHO_DIFFERS = "echo_differs"
    """The engine reported other prompt ids than it was sent. The step has those that it reported."""
    FAILED = "failed"
    """An error of the bridge itself; the log has it."""


class CannotBridge(Exception):
    """Why a call is rendered by its engine."""

    def __init__(self, outcome: BridgeOutcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


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


@dataclass(slots=True, eq=False)
class _Line:
    """Tokens that several turns begin with."""

    tokens: IntArray


@dataclass(slots=True, eq=False)
class _KeptTurn:
    uid: str
    line: _Line
    length: int
    finish_reason: str | None
    conversation_digest: ConversationDigest
    others: tuple[str, ...]

    def turn(self) -> Turn:
        return Turn(
            self.uid, self.line.tokens[: self.length], self.finish_reason, self.conversation_digest, self.others
        )


@dataclass(slots=True, eq=False)
class _TrajectoryTurns:
    by_uid: dict[str, _KeptTurn] = field(default_factory=dict)
    nbytes: int = 0

    def last_before(self, tokens: IntArray) -> _KeptTurn | None:
        """The newest turn, if these tokens begin with its own."""
        last = next(reversed(self.by_uid.values()), None)
        is_first_part = last is not None and np.array_equal(last.line.tokens[: last.length], tokens[: last.length])
        return last if is_first_part else None


class RecentTurns:
    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.nbytes = 0
        self._max_bytes = max_bytes
        self._trajectories: OrderedDict[str, _TrajectoryTurns] = OrderedDict()
        """The one that was used last comes last."""

    def __len__(self) -> int:
        """The number of trajectories."""
        return len(self._trajectories)

    def of(self, trajectory_uid: str) -> Sequence[Turn]:
        found = self._trajectories.get(trajectory_uid)
        if found is None:
            return ()
        self._trajectories.move_to_end(trajectory_uid)
        return [kept.turn() for kept in found.by_uid.values()]

    def add(self, trajectory_uid: str, turn: Turn, parent: Turn | None = None) -> None:
        """`parent` is the turn with whose tokens those of `turn` begin; None if there is none."""
        found = self._trajectories.setdefault(trajectory_uid, _TrajectoryTurns())
        self._trajectories.move_to_end(trajectory_uid)
        before = found.by_uid.get(parent.uid) if parent is not None else found.last_before(turn.tokens)
        added = turn.tokens.nbytes + OVERHEAD
        if before is not None and before.length == len(before.line.tokens):
            line, added = before.line, added - before.line.tokens.nbytes
            line.tokens = turn.tokens
        else:
            line = _Line(turn.tokens)
        length = len(turn.tokens)
        found.by_uid[turn.uid] = _KeptTurn(
            turn.uid, line, length, turn.finish_reason, turn.conversation_digest, turn.others
        )
        found.nbytes += added
        self.nbytes += added
        while self.nbytes > self._max_bytes:
            _, oldest = self._trajectories.popitem(last=False)
            self.nbytes -= oldest.nbytes

    def drop(self, trajectory_uid: str) -> None:
        if (found := self._trajectories.pop(trajectory_uid, None)) is not None:
            self.nbytes -= found.nbytes


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
