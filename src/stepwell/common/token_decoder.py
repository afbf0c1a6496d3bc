"""Token ids as text: whole, and one by one.

A token that holds only some bytes of a character has no text of its own: the character stands with the last of its
tokens, and the tokens before have an empty text. So the texts of single tokens, joined, are the text of the whole.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

BROKEN = "\N{REPLACEMENT CHARACTER}"
NO_TOKENIZER = "there is no tokenizer here; give --tokenizer-path to see texts"


class Tokenizer(Protocol):
    def start(self) -> None:
        """Begin to load."""

    def why_not_ready(self) -> str | None: ...

    def decode(self, ids: Sequence[int]) -> str:
        """With special tokens in the text."""


class Decoder:
    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def start(self) -> None:
        if self._tokenizer is not None:
            self._tokenizer.start()

    def why_not(self) -> str:
        """Why there are no texts; empty if there are."""
        return NO_TOKENIZER if self._tokenizer is None else self._tokenizer.why_not_ready() or ""

    def text(self, ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(ids) if ids else ""

    def texts(self, ids: Sequence[int]) -> list[str]:
        """One a token. Nearly always a token's text is the same wherever it stands; where it is not, each is told by
        what it adds to the tokens before."""
        found = list(self._alone(ids))
        return found if "".join(found) == self.text(ids) else list(self._in_turn(ids))

    def _alone(self, ids: Sequence[int]) -> Iterator[str]:
        broken: list[int] = []
        for token in ids:
            piece = self._piece(token)
            broken.append(token)
            if len(broken) > 1 or BROKEN in piece:
                piece = self.text(broken)
                if BROKEN in piece and len(broken) < 4:
                    yield ""
                    continue
            broken.clear()
            yield piece
        # a character that the response was cut within is left to _in_turn

    def _in_turn(self, ids: Sequence[int]) -> Iterator[str]:
        start = read = 0
        for end in range(1, len(ids) + 1):
            before, now = self.text(ids[start:read]), self.text(ids[start:end])
            if (now.endswith(BROKEN) and end < len(ids)) or len(now) <= len(before):
                yield ""
            else:
                yield now[len(before) :]
                start, read = read, end

    def _piece(self, token: int) -> str:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self.text([token])
        return piece
