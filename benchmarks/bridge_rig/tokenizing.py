"""Texts as token ids: one id for each control token of a template, and what a tokenizer makes of the rest."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from tokenizers import Tokenizer

from benchmarks.bridge_rig.matrix_tables import TEXT
from benchmarks.bridge_rig.public_templates import fetched
from stepwell.steps.step import IntArray, ids_array

TOKENIZERS = ("qwen", "deepseek", "tekken")
CONTROL_IDS = 10_000_000
"""No tokenizer has as many tokens; control tokens are numbered from here."""

Encode = Callable[[str], tuple[int, ...]]


class Tokens:
    """A tokenizer with the control tokens of one chat template, which split a text before anything else does."""

    def __init__(self, name: str, controls: Iterable[str]) -> None:
        self.name = name
        self.controls = sorted(controls, key=lambda text: (-len(text), text))
        self._ids: Mapping[str, int] = {text: CONTROL_IDS + place for place, text in enumerate(self.controls)}
        self._split = re.compile("(" + "|".join(map(re.escape, self.controls)) + ")")
        self._encode, self._decode = PLAIN if name == TEXT else real_tokenizer(name)

    def encode(self, text: str) -> IntArray:
        ids: list[int] = []
        for piece in self._split.split(text):
            if piece in self._ids:
                ids.append(self._ids[piece])
            elif piece:
                ids += self._encode(piece)
        return ids_array(ids)

    def controls_in(self, text: str) -> list[str]:
        return self._split.findall(text)

    def decode(self, ids: IntArray) -> str:
        text, plain = "", []
        for token in ids.tolist():
            if token < CONTROL_IDS:
                plain.append(token)
            else:
                text += self._decode(tuple(plain)) + self.controls[token - CONTROL_IDS]
                plain = []
        return text + self._decode(tuple(plain))


def _letters(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def _spelled(ids: tuple[int, ...]) -> str:
    return "".join(map(chr, ids))


PLAIN: tuple[Encode, Callable[[tuple[int, ...]], str]] = (_letters, _spelled)


@lru_cache
def real_tokenizer(name: str) -> tuple[Encode, Callable[[tuple[int, ...]], str]]:
    tokenizer = Tokenizer.from_file(str(fetched() / "tokenizers" / f"{name}.json"))

    @lru_cache(maxsize=100_000)
    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    @lru_cache(maxsize=10_000)
    def decode(ids: tuple[int, ...]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return encode, decode
