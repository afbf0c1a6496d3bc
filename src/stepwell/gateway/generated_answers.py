"""How the last answers of /generate were sampled, for submitted steps that do not tell it.

- A step that tells its temperature or any parameter is not changed.
- A step is recognised by its tokens. If the same tokens were sampled in two ways, nobody knows which one it was.
- Only this process knows what it has answered: another gateway, or another worker of this one, does not.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from stepwell.steps.step import IntArray, Step, ids_array

MOST = 16_384
"""Answers that are remembered: a few megabytes."""


@dataclass(frozen=True, slots=True)
class AnswerSampling:
    temperature: float | None
    untrainable: str | None


class GeneratedAnswers:
    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: OrderedDict[bytes, AnswerSampling | None] = OrderedDict()

    def note(self, prompt_ids: Sequence[int], response_ids: IntArray, sampled: AnswerSampling) -> None:
        name = _digest(ids_array(prompt_ids), response_ids)
        self._known[name] = sampled if self._known.get(name, sampled) == sampled else None
        self._known.move_to_end(name)
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def complete(self, step: Step) -> Step:
        """The step with what is known of its sampling."""
        if step.temperature is not None or step.sampling:
            return step
        known = self._known.get(_digest(step.prompt_ids, step.response_ids))
        if known is None:
            return step
        return replace(step, temperature=known.temperature, untrainable=step.untrainable or known.untrainable)


def _digest(prompt_ids: IntArray, response_ids: IntArray) -> bytes:
    told = blake2b(len(prompt_ids).to_bytes(8, "little"), digest_size=16)
    told.update(prompt_ids.astype(np.int32).tobytes())
    told.update(response_ids.astype(np.int32).tobytes())
    return told.digest()
