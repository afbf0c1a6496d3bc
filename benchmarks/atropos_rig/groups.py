"""The groups that are sent. No two are alike: a server may know a group by its content and take it once."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import orjson

SEQUENCES = 8
VOCABULARY = 150_000
PROMPT_SHARE = 0.25
UNTRAINED, FILLER = -100, 1.0
"""What Atropos writes where a token is not trained: as mask, and as log-probability."""

numbers = count()
luck = np.random.default_rng(0)

Group = dict[str, Any]


def make_group(length: int, *, env_id: int = 0) -> Group:
    """Eight sequences with log-probabilities; the last three quarters of each are trained."""
    prompt = int(length * PROMPT_SHARE)
    tokens = luck.integers(0, VOCABULARY, (SEQUENCES, length), dtype=np.int32)
    masks, logprobs = tokens.copy(), -luck.random((SEQUENCES, length), dtype=np.float32)
    masks[:, :prompt], logprobs[:, :prompt] = UNTRAINED, FILLER
    return {
        "tokens": tokens.tolist(),
        "masks": masks.tolist(),
        "scores": [float(place % 2) for place in range(SEQUENCES)],
        "inference_logprobs": logprobs.tolist(),
        "env_id": env_id,
    }


class Templates:
    """A few groups of one length, sent again and again under new scores: making one costs more than taking one."""

    def __init__(self, length: int, many: int) -> None:
        self._groups = [make_group(length) for _ in range(many)]
        self._halves = [_halves(group) for group in self._groups]

    def json(self) -> Iterator[bytes]:
        """Bodies without end."""
        for number in numbers:
            head, tail = self._halves[number % len(self._halves)]
            yield b"%b%.6f%b" % (head, number / 1e6, tail)

    def groups(self) -> Iterator[Group]:
        """The same, as values."""
        for number in numbers:
            yield rescored(self._groups[number % len(self._groups)])


def rescored(group: Group) -> Group:
    """The same tokens as another group."""
    return group | {"scores": [next(numbers) / 1e6, *group["scores"][1:]]}


def _halves(group: Group) -> tuple[bytes, bytes]:
    """Its JSON before and after the first score."""
    mark = 123456.75
    body = orjson.dumps(group | {"scores": [mark, *group["scores"][1:]]})
    head, _, tail = body.partition(str(mark).encode())
    return head, tail
