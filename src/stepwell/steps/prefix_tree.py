"""The tokens of one trajectory, each stored once.

The prompt of a turn usually repeats everything before it. A step therefore keeps only what it adds to the longest
prefix that is already stored: a session costs its final length, not the square of its turns. Where a step does not
continue the conversation (a template dropped its thinking, the agent compacted, a sub-agent began), a branch forks off.

- `read(placement.branch, length)` gives the placed tokens back, bit for bit, whatever was placed after them.
- The number of a branch never changes. The newest branch takes over the node in which it forks, and the rest of the
  older branch moves into a child. So a template that forks in every turn makes one node with many children, no chain.
- No method recurses.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Optional

import numpy as np

from stepwell.steps.step import IntArray

ROOT = -1
"""The base of a sequence that shares nothing with any other."""


A_FEW = 8
"""The last tokens of a sequence: if others end in the same way, all are compared."""


class Node:
    """A run of tokens behind the first `start` tokens of its parent's path."""

    __slots__ = ("_places", "branch", "children", "parent", "start", "tail")

    def __init__(self, parent: Optional["Node"], start: int, tail: IntArray, branch: int) -> None:
        self.parent = parent
        self.start = start
        self.tail = tail
        self.branch = branch
        """The branch that ends where the node ends."""
        self.children: dict[tuple[int, int], Node] | None = None
        """The child nodes, by position and first token; None as long as there is none."""
        self._places: list[tuple[int, int]] = []
        """The keys of the children, in order: a node may have a child for every turn."""

    @property
    def end(self) -> int:
        return self.start + len(self.tail)

    def child(self, position: int, token: int) -> Optional["Node"]:
        return None if self.children is None else self.children.get((position, token))

    def adopt(self, child: "Node") -> None:
        child.parent = self
        self.children = {} if self.children is None else self.children
        key = (child.start, int(child.tail[0]))
        self.children[key] = child
        insort(self._places, key)

    def split(self, position: int) -> "Node":
        """Move everything from `position` on into a new child, which is returned."""
        rest = Node(self, position, self.tail[position - self.start :].copy(), self.branch)
        if self.children is not None:
            first_later = bisect_left(self._places, (position + 1, 0))
            for key in self._places[first_later:]:
                rest.adopt(self.children.pop(key))
            del self._places[first_later:]
        self.tail = self.tail[: position - self.start]
        self.adopt(rest)
        return rest


class Placement(NamedTuple):
    """How a sequence was stored: the first `shared` tokens of `base`, then `added`. Enough to store it again."""

    branch: int
    """The branch from which the sequence can be read."""
    base: int
    shared: int
    added: IntArray
    is_fork: bool
    """Did it open a branch beside others?"""


class PrefixTree:
    __slots__ = ("_branches", "_roots")

    def __init__(self) -> None:
        self._branches: list[Node] = []
        """The node in which each branch ends."""
        self._roots: tuple[Node, ...] = ()

    def dump(self) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        """The tree in plain values, for `load`: the parent and the start of each branch's node, and the tokens of
        each."""
        places = [(ROOT if node.parent is None else node.parent.branch, node.start) for node in self._branches]
        return tuple(chain(*places)), tuple(node.tail.tobytes() for node in self._branches)

    @classmethod
    def load(cls, dumped: tuple[tuple[int, ...], tuple[bytes, ...]]) -> "PrefixTree":
        """A tree like the one that was dumped. Its arrays are read-only, as all that are read from a tree."""
        tree, (places, tails) = cls(), dumped
        parents, starts = places[::2], places[1::2]
        tree._branches = [
            Node(None, start, np.frombuffer(tail, np.int32), branch)
            for branch, (start, tail) in enumerate(zip(starts, tails, strict=True))
        ]
        for node, parent in zip(tree._branches, parents, strict=True):
            if parent != ROOT:
                tree._branches[parent].adopt(node)
        tree._roots = tuple(node for node in tree._branches if node.parent is None)
        return tree

    @property
    def forks(self) -> int:
        return max(0, len(self._branches) - 1)

    def place(self, tokens: IntArray) -> Placement:
        """Store a sequence. Only what is new is copied."""
        if not self._branches:
            added = tokens.copy()
            return Placement(self.restore(ROOT, 0, added), ROOT, 0, added, False)
        base, shared = self.longest_prefix(tokens)
        added = tokens[shared:].copy()
        branch = self.restore(base, shared, added)
        return Placement(branch, base, shared, added, branch not in (base, 0))

    def restore(self, base: int, shared: int, added: IntArray) -> int:
        """Store a sequence as a placement says. Gives its branch."""
        if base != ROOT and len(added) == 0:
            return base
        branch, node = len(self._branches), None if base == ROOT else self._node(base, shared)
        if node is None:
            node = Node(None, 0, added, branch)
            self._roots = (*self._roots, node)
        elif shared == node.end:
            node.tail = np.concatenate([node.tail, added])
            return node.branch
        else:
            older = node.branch
            self._branches[older] = node.split(shared)
            node.tail, node.branch = np.concatenate([node.tail, added]), branch
        self._branches.append(node)
        return branch

    def can_restore(self, base: int, shared: int) -> bool:
        """Whether the base is there."""
        return base == ROOT or (base < len(self._branches) and shared <= self._branches[base].end)

    def read(self, branch: int, length: int, first: int = 0) -> IntArray:
        """The tokens of a branch from `first` up to `length`; a view where they lie in one piece."""
        end = self._branches[branch]
        if end.parent is None:
            return end.tail[first:length]
        node: Node | None = end
        parts: list[IntArray] = []
        while node is not None and (length > first or not parts):
            if length > node.start or node.parent is None:
                parts.append(node.tail[max(0, first - node.start) : max(0, length - node.start)])
                length = node.start
            node = node.parent
        return parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])

    def longest_prefix(self, tokens: IntArray) -> tuple[int, int]:
        """A branch that shares as much with `tokens` as any, and how much."""
        for node in self._roots:
            if shared := common_prefix(node.tail, tokens):
                break
        else:
            return ROOT, 0
        while shared < len(tokens) and (child := node.child(shared, int(tokens[shared]))) is not None:
            node = child
            shared += common_prefix(node.tail, tokens[shared:])
        return node.branch, shared

    def is_like(self, other: "PrefixTree") -> bool:
        """Were the same sequences placed in both in the same order?"""
        if len(self._branches) != len(other._branches):
            return False
        for a, b in zip(self._branches, other._branches, strict=True):
            if a.start != b.start or len(a.tail) != len(b.tail):
                return False
            if a.tail[-A_FEW:].tobytes() != b.tail[-A_FEW:].tobytes() or a.tail.tobytes() != b.tail.tobytes():
                return False
        return True

    def agree(self, first: int, second: int, length: int) -> bool:
        """Do two branches begin with the same `length` tokens?"""
        return self._node(first, length) is self._node(second, length)

    def bases(self, sequences: Sequence[tuple[int, int]], first: int = 0) -> list[tuple[int, int]]:
        """The base of each sequence (branch, length): which one before it shares most with it, and how much.

        Sequences are numbered from `first` on. (ROOT, 0) for one that shares nothing with those before it.
        """
        if len(self._branches) == 1:
            return _bases_in_line(sequences, first)
        longest: dict[Node, tuple[int, int]] = {}
        """The sequence that covers most of the path to the end of a node, and how much it covers."""
        found: list[tuple[int, int]] = []
        for place, (branch, length) in enumerate(sequences, first):
            found.append(self._longest_before(longest, branch, length))
            self._cover(longest, place, branch, length)
        return found

    def _longest_before(self, longest: dict[Node, tuple[int, int]], branch: int, length: int) -> tuple[int, int]:
        best = (ROOT, 0)
        node: Node | None = self._branches[branch]
        while node is not None and best[1] < length:
            if node in longest:
                place, covered = longest[node]
                if (shared := min(covered, length)) > best[1]:
                    best = (place, shared)
            length, node = min(length, node.start), node.parent
        return best

    def _cover(self, longest: dict[Node, tuple[int, int]], place: int, branch: int, length: int) -> None:
        node: Node | None = self._branches[branch]
        while node is not None and length > 0 and (node not in longest or longest[node][1] < length):
            longest[node] = (place, length)
            length, node = min(length, node.start), node.parent

    def _node(self, base: int, shared: int) -> Node | None:
        """The node in which the first `shared` tokens of a branch end; None if there is no token."""
        node = None if base == ROOT or shared == 0 else self._branches[base]
        while node is not None and shared <= node.start:
            node = node.parent
        return node


def _bases_in_line(sequences: Sequence[tuple[int, int]], first: int) -> list[tuple[int, int]]:
    """The bases of sequences of one branch: of any two, one is a prefix of the other."""
    found: list[tuple[int, int]] = []
    longest, covered = ROOT, 0
    for place, (_, length) in enumerate(sequences, first):
        if length > covered:
            found.append((longest, covered))
            longest, covered = place, length
        else:
            found.append((longest, length) if length else (ROOT, 0))
    return found


def common_prefix(a: IntArray, b: IntArray) -> int:
    """How many tokens two sequences have in common, counted from the first."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length
