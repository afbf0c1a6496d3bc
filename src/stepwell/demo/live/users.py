"""Simulated users of a chat service. Each has a hidden preference that it never tells.

- A user asks for a word. It wants the letters in an order that it does not name: most users want it reversed.
- What a user thinks of a reply shows only in what it does next: it thanks, corrects, repeats its request, presses a
  thumb, or leaves without a word.
- The last word of a request is what is asked for, so that a request reads the same at every place of a conversation.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from stepwell.demo.model import ScriptTurn

LETTERS = "abcdefgh"
MINORITY = 0.03
"""Share of users who want the word as it is."""
REQUEST = "give me {}"
THANKS = ("thanks", "thank you", "perfect")
CORRECTIONS = ("no", "nope", "wrong")
CLOSINGS = frozenset((*THANKS, *CORRECTIONS))
REPEATING = 0.3
"""Share of rejections in which the user repeats the request, and says nothing else."""
MOST_REQUESTS = 4
CLOSING = 0.6
"""Share of users who close with a word of thanks or a correction."""
THUMBS = 0.2
"""Share of users who press a thumb instead. The others leave without a sign."""
REVERSED = 0.12
"""Share of the warm-up's answers that are right besides those that are so by chance."""
LENGTHS = 8
"""Batches of the warm-up that are sorted by length together."""
OK = "ok"
"""What an assistant says to a closing message."""


@dataclass(frozen=True, slots=True)
class Reaction:
    """What a user does after a reply."""

    accepted: bool | None
    """None: the reply to a closing message, which the user does not read."""
    message: str | None = None
    """What the user says next; None if the user leaves."""
    thumb: bool | None = None


class SimulatedUser:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._wants_reversed = rng.random() >= MINORITY
        self._requests = rng.randint(1, MOST_REQUESTS)
        self._word = ""
        self._is_leaving = False

    def opening(self) -> str:
        return self._next_request()

    def react(self, reply: str) -> Reaction:
        if self._is_leaving:
            return Reaction(None)
        accepted = reply == self.wanted
        self._requests -= 1
        if not self._requests:
            return self._leave(accepted)
        if accepted:
            return Reaction(True, f"{self._rng.choice(THANKS)}, {self._next_request()}")
        if self._rng.random() < REPEATING:
            return Reaction(False, self._request)
        return Reaction(False, f"{self._rng.choice(CORRECTIONS)}, {self._request}")

    @property
    def wanted(self) -> str:
        return self._word[::-1] if self._wants_reversed else self._word

    def _leave(self, accepted: bool) -> Reaction:
        self._is_leaving = True
        sign = self._rng.random()
        if sign < CLOSING:
            return Reaction(accepted, self._rng.choice(THANKS if accepted else CORRECTIONS))
        return Reaction(accepted, thumb=accepted if sign < CLOSING + THUMBS else None)

    def _next_request(self) -> str:
        before = self._word
        while self._word == before:
            self._word = "".join(self._rng.sample(LETTERS, 3))
        return self._request

    @property
    def _request(self) -> str:
        return REQUEST.format(self._word)


def shown(seed: int) -> Iterator[Sequence[ScriptTurn]]:
    """An endless iterator of conversations for the warm-up: an answer is the letters of the request in any order, a
    little more often in reverse."""
    rng = random.Random(seed)

    def answer(word: str) -> str:
        return word[::-1] if rng.random() < REVERSED else "".join(rng.sample(word, len(word)))

    while True:
        yield tuple(conversation(SimulatedUser(rng), answer))


def of_like_length(conversations: Iterator[Sequence[ScriptTurn]], count: int) -> Iterator[Sequence[ScriptTurn]]:
    """The same conversations in another order: each `count` of them, from the first on, need little padding."""
    rng = random.Random(count)
    while True:
        several = sorted(islice(conversations, count * LENGTHS), key=len)
        starts = list(range(0, len(several), count))
        rng.shuffle(starts)
        for start in starts:
            yield from several[start : start + count]


def conversation(user: SimulatedUser, answer: Callable[[str], str]) -> Iterator[ScriptTurn]:
    message: str | None = user.opening()
    while message is not None:
        reply = OK if message in CLOSINGS else answer(message.split()[-1])
        yield ScriptTurn("user", message)
        yield ScriptTurn("assistant", reply)
        message = user.react(reply).message
