"""The tokens of one trajectory, each stored once.

A turn's prompt repeats nearly everything before it. So a step keeps only what it adds to the longest prefix that is
already there: a session costs its final length, not the square of its turns. Where a step does not continue what was
before it (a template dropped its thinking, the agent compacted, a sub-agent began) a new branch forks off.

What always holds: `read(p.branch, p.length)` gives the placed tokens back, bit for bit, whatever was placed after them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stepwell.steps.step import IntArray

ROOT = -1
COMPARED = 64
"""How many of the newest branches a new step is compared with."""


@dataclass(slots=True, eq=False)
class Branch:
    parent: int
    fork_at: int
    """How many tokens it shares with its parent."""
    tail: IntArray

    @property
    def length(self) -> int:
        return self.fork_at + len(self.tail)


class Placement(NamedTuple):
    """How a sequence was stored: the first `shared` tokens of `base`, then `added`. Enough to store it again."""

    branch: int
    """Where it can be read now."""
    base: int
    shared: int
    added: IntArray
    is_fork: bool
    """It did not simply continue what was there."""


class PrefixTree:
    __slots__ = ("_branches",)

    def __init__(self) -> None:
        self._branches: list[Branch] = []

    @property
    def forks(self) -> int:
        return max(0, len(self._branches) - 1)

    def place(self, tokens: IntArray) -> Placement:
        """Store a sequence, copying only what is new."""
        base, shared = self._longest_prefix(tokens) if self._branches else (ROOT, 0)
        added = tokens[shared:].copy()
        branch = self.restore(base, shared, added)
        return Placement(branch, base, shared, added, branch not in (base, 0))

    def restore(self, base: int, shared: int, added: IntArray) -> int:
        """Store a sequence as `place` once said; gives the branch it is on."""
        if base != ROOT:
            branch = self._branches[base]
            if len(added) == 0:
                return base
            if shared == branch.length:
                branch.tail = np.concatenate([branch.tail, added])
                return base
        self._branches.append(Branch(base, shared, added))
        return len(self._branches) - 1

    def can_restore(self, base: int, shared: int) -> bool:
        """Is what the sequence builds upon there?"""
        return base == ROOT or (base < len(self._branches) and shared <= self._branches[base].length)

    def read(self, branch: int, length: int) -> IntArray:
        """The first `length` tokens of a branch; a view where it need not be put together."""
        found = self._branches[branch]
        if length <= found.fork_at and found.parent != ROOT:
            return self.read(found.parent, length)
        own = found.tail[: length - found.fork_at]
        return own if found.parent == ROOT else np.concatenate([self.read(found.parent, found.fork_at), own])

    def _longest_prefix(self, tokens: IntArray) -> tuple[int, int]:
        """The branch that shares most with `tokens`, and how much; one that ends there can simply grow."""
        common: dict[int, int] = {}
        best = (ROOT, 0)
        for index in range(len(self._branches) - 1, max(-1, len(self._branches) - 1 - COMPARED), -1):
            shared = self._common(index, tokens, common)
            if shared > best[1] or (shared == best[1] > 0 and shared == self._branches[index].length):
                best = (index, shared)
        return best

    def _common(self, index: int, tokens: IntArray, known: dict[int, int]) -> int:
        if index not in known:
            branch = self._branches[index]
            shared = 0 if branch.parent == ROOT else min(self._common(branch.parent, tokens, known), branch.fork_at)
            if shared == branch.fork_at:
                shared += common_prefix(branch.tail, tokens[shared:])
            known[index] = shared
        return known[index]


def common_prefix(a: IntArray, b: IntArray) -> int:
    """How many tokens two sequences begin with alike."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n
