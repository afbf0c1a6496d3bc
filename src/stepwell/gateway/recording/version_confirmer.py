"""Under which weights a chat reply was sampled: bracketed between what the engine said before the call and after it.

Where both agree, the version is certain. Where they differ, the weights changed somewhere in between: the step keeps
the older version, by which its staleness is counted, and says in its extras that it is a bracket.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replica import EngineReplica
from stepwell.steps.step import JsonObject, Step, VersionSpan

BRACKET = "version_bracket"
"""In a step's extras: the versions before and after a call during which the weights changed."""


class VersionConfirmer:
    def __init__(self, engines: EngineFleet) -> None:
        self._engines = engines
        self._sampled_by: dict[str, EngineReplica] = {}
        self._after: dict[str, int | None] = {}

    def note(self, step: Step, engine: EngineReplica) -> None:
        """Remember who wrote a step, until it is sealed."""
        if engine.facts.weight_versions and not step.version_spans:
            self._sampled_by[step.uid] = engine

    async def seal(self, steps: Sequence[Step]) -> list[Step]:
        """The steps with their versions confirmed, by asking each engine once for all of them."""
        unsealed = {step.uid: engine for step in steps if (engine := self._sampled_by.pop(step.uid, None)) is not None}
        engines = tuple(set(unsealed.values()))
        answers = await asyncio.gather(*(self._engines.version_after(engine) for engine in engines))
        told = dict(zip(engines, answers, strict=True))
        self._after.update((uid, told[engine]) for uid, engine in unsealed.items())
        return [_sealed(step, self._after.get(step.uid)) for step in steps]

    def forget(self, step: Step) -> None:
        self._sampled_by.pop(step.uid, None)
        self._after.pop(step.uid, None)


def _sealed(step: Step, after: int | None) -> Step:
    if after is None:
        return step
    if after == step.policy_version:
        return replace(step, version_spans=(VersionSpan(after, 0, len(step.response_ids)),))
    extras: JsonObject = {**step.extras, BRACKET: [step.policy_version, after]}
    return replace(step, policy_version=min(step.policy_version, after), extras=extras)
