"""Which steps of a trajectory make one sequence: those that extend one another, token for token.

An agent's next prompt usually repeats the conversation so far, but nothing promises it: templates strip thinking,
agents compact, sub-agents branch. So a step joins a row only if everything in the row is a prefix of its prompt, and
opens a row of its own, a fork, where no row is. What always holds: each step is in one row; the tokens of a row are
those of its last step, for that step's prompt holds all before it; rows of a trajectory stand together, in the order in
which they were opened.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from stepwell.steps.columns import Columns
from stepwell.steps.layout import IndexArray, token_offsets

ID_BYTES = 4


class ForkReason(StrEnum):
    """Where a step first differs from the row it has most in common with."""

    REPEATED = "repeated"
    """Nowhere, but its prompt ends inside the row: the call was made again, or the agent went back."""
    REPLY_CHANGED = "reply_changed"
    """At a token the model wrote: thinking stripped, a tool call rendered anew, text encoded anew."""
    CONTEXT_CHANGED = "context_changed"
    """At a token the model was given: compaction, another system prompt, a sub-agent."""


@dataclass(slots=True, eq=False)
class OpenRow:
    """A row that later steps may still join. Tokens are bytes, for comparing them stops at the first difference."""

    number: int
    tokens: bytes
    written: list[tuple[int, int]] = field(default_factory=list)
    """From where to where the model wrote."""

    def wrote(self, place: int) -> bool:
        return any(start <= place < end for start, end in self.written)


@dataclass(frozen=True, slots=True, eq=False)
class Stitching:
    row_of_S: IndexArray
    rows: int
    forks: Counter[ForkReason]


def stitch(columns: Columns, trajectory_of_S: IndexArray) -> Stitching:
    row_of_S = np.empty(len(columns), np.int64)
    forks: Counter[ForkReason] = Counter()
    places, prompt_lengths = token_offsets(columns).tolist(), columns.prompt_lengths_S.tolist()
    trajectory, opened = -1, 0
    rows: list[OpenRow] = []
    for i, of_step in enumerate(trajectory_of_S.tolist()):
        if of_step != trajectory:
            trajectory, rows = of_step, []
        tokens = columns.tokens[places[i] : places[i + 1]].tobytes()
        row = _extended(rows, tokens, prompt_lengths[i])
        if row is None:
            if rows:
                forks[_reason(rows, tokens[: ID_BYTES * prompt_lengths[i]])] += 1
            row = OpenRow(opened, tokens)
            rows.append(row)
            opened += 1
        row.tokens = tokens
        row.written.append((prompt_lengths[i], len(tokens) // ID_BYTES))
        row_of_S[i] = row.number
    return Stitching(row_of_S, opened, forks)


def _extended(rows: list[OpenRow], tokens: bytes, prompt_length: int) -> OpenRow | None:
    """The longest row that the prompt begins with; of equals the newest."""
    prompt_ends = ID_BYTES * prompt_length
    fits = [row for row in rows if tokens.startswith(row.tokens, 0, prompt_ends)]
    return max(fits, key=lambda row: (len(row.tokens), row.number), default=None)


def _reason(rows: list[OpenRow], prompt: bytes) -> ForkReason:
    closest, shared = rows[-1], -1
    beyond = b""
    for row in reversed(rows):
        if row.tokens.startswith(beyond):  # else it cannot have more in common than the closest so far
            closest, shared = max((closest, shared), (row, _shared(row.tokens, prompt)), key=lambda found: found[1])
            beyond = prompt[: ID_BYTES * (shared + 1)]
    if shared * ID_BYTES == len(prompt):
        return ForkReason.REPEATED
    return ForkReason.REPLY_CHANGED if closest.wrote(shared) else ForkReason.CONTEXT_CHANGED


def _shared(a: bytes, b: bytes) -> int:
    """How many tokens they have in common from the start."""
    both = min(len(a), len(b)) // ID_BYTES
    differs = np.frombuffer(a, np.int32, both) != np.frombuffer(b, np.int32, both)
    return int(differs.argmax()) if differs.any() else both
