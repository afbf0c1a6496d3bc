"""`rev`: say a word of three letters backwards. The word is all that the model is told."""

import random
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import TYPE_CHECKING

from stepwell.demo.vocabulary import Turn

if TYPE_CHECKING:
    from openai import AsyncOpenAI

LETTERS = "abcdefgh"


class Reversing:
    updates = 150

    def samples(self) -> list[dict[str, str]]:
        return [{"word": "".join(letters)} for letters in permutations(LETTERS, 3)]

    def shown(self, sample: Mapping[str, str], chance: random.Random) -> Sequence[Turn]:
        """The right letters in any order: one of six is the right one."""
        word = sample["word"]
        return Turn("user", word), Turn("assistant", "".join(chance.sample(word, len(word))))

    async def play(self, client: "AsyncOpenAI", sample: Mapping[str, str]) -> float:
        reply = await client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": sample["word"]}],
            temperature=1.0,
            max_tokens=5,
        )
        return float(reply.choices[0].message.content == sample["word"][::-1])
