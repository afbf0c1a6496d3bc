"""The recorded turns of the trajectories that this gateway served last, within a bound of bytes.

A turn that continues another one shares its array: a conversation costs its final length, not the square of its turns.
So does one that was rendered anew, if it begins with the tokens of the turn before it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stepwell.gateway.bridge.digests import ConversationDigest
from stepwell.gateway.bridge.recorded_turns import Turn
from stepwell.steps.step import IntArray

MAX_BYTES = 256 * 2**20
OVERHEAD = 600
"""About the bytes of a turn without its tokens."""


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
