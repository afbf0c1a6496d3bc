"""What this gateway knows of the generations that white-box agents asked it for.

An agent may submit no more than tokens and log-probabilities. A step that has exactly those of a generation gets what
the agent leaves out: temperature and sampling parameters, versions, model.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from stepwell.steps.step import JsonObject, Step, VersionSpan

MOST = 20_000
"""Generations that are remembered."""


@dataclass(frozen=True, slots=True)
class Told:
    policy_version: int
    version_spans: tuple[VersionSpan, ...]
    sampling: JsonObject
    temperature: float | None
    model: str
    finish_reason: str | None


class Generations:
    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._told: OrderedDict[bytes, Told] = OrderedDict()

    def add(self, step: Step, told: Told) -> None:
        """`step` has the tokens and the log-probabilities."""
        self._told[_digest(step)] = told
        if len(self._told) > self._most:
            self._told.popitem(last=False)

    def complete(self, step: Step) -> Step:
        """What the step itself says stays. Versions are told by both of its fields, or by none."""
        if step.response_logprobs is None or (step.version_spans and step.sampling):
            return step
        told = self._told.get(_digest(step))
        if told is None:
            return step
        versions = {"version_spans": told.version_spans, "policy_version": told.policy_version}
        return replace(
            step,
            **({} if step.version_spans else versions),  # type: ignore[arg-type]
            sampling=step.sampling or told.sampling,
            temperature=told.temperature if step.temperature is None and not step.sampling else step.temperature,
            model=step.model or told.model,
            finish_reason=step.finish_reason or told.finish_reason,
        )


def _digest(step: Step) -> bytes:
    digest = blake2b(digest_size=16)
    for array in (step.prompt_ids, step.response_ids):
        digest.update(len(array).to_bytes(8))
        digest.update(np.ascontiguousarray(array, np.int32).tobytes())
    digest.update(np.ascontiguousarray(step.response_logprobs, np.float32).tobytes())
    return digest.digest()
