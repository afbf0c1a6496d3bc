"""Knowledge of the generations that white-box agents asked this gateway for.

- An agent may submit no more than tokens, with their log-probabilities or without. A step that has exactly those of a
  generation gets what the agent leaves out: temperature and sampling parameters, versions, model.
- If the same tokens were generated in two ways, what differs is not known.
- Only this process knows what it has answered: another gateway, or another worker of this one, does not.
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

    def common(self, other: "Told") -> "Told":
        """The values that both tell."""
        common = self
        if (self.policy_version, self.version_spans) != (other.policy_version, other.version_spans):
            common = replace(common, policy_version=0, version_spans=())
        if self.sampling != other.sampling:
            common = replace(common, sampling={}, temperature=None)
        if self.model != other.model:
            common = replace(common, model="")
        return common if self.finish_reason == other.finish_reason else replace(common, finish_reason=None)


class Generations:
    def __init__(self, most: int = MOST) -> None:
        self._most = 2 * most
        self._told: OrderedDict[bytes, Told] = OrderedDict()
        """Each generation under two names: with its log-probabilities and without."""

    def add(self, step: Step, told: Told) -> None:
        """`step` has the tokens and the log-probabilities."""
        for name in (_digest(step), _digest(replace(step, response_logprobs=None))):
            self._told[name] = told.common(self._told.pop(name, told))
        while len(self._told) > self._most:
            self._told.popitem(last=False)

    def complete(self, step: Step) -> Step:
        """Completes the step; what it says itself stays. Versions are told by both of its fields, or by none;
        temperature and sampling parameters likewise."""
        told = self._told.get(_digest(step))
        if told is None:
            return step
        says_versions, says_sampling = bool(step.version_spans), step.temperature is not None or bool(step.sampling)
        return replace(
            step,
            version_spans=step.version_spans if says_versions else told.version_spans,
            policy_version=step.policy_version if says_versions else told.policy_version or step.policy_version,
            sampling=step.sampling or (told.sampling if step.temperature in (None, told.temperature) else {}),
            temperature=step.temperature if says_sampling else told.temperature,
            model=step.model or told.model,
            finish_reason=step.finish_reason or told.finish_reason,
        )


def _digest(step: Step) -> bytes:
    digest = blake2b(digest_size=16)
    for array in (step.prompt_ids, step.response_ids):
        digest.update(len(array).to_bytes(8))
        digest.update(np.ascontiguousarray(array, np.int32).tobytes())
    if step.response_logprobs is not None:
        digest.update(np.ascontiguousarray(step.response_logprobs, np.float32).tobytes())
    return digest.digest()
