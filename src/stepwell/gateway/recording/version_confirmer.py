"""Which weights sampled a chat answer: the engine is asked for its version before the call and after it.

- If both answers agree, the version is certain.
- If they differ, the weights changed during the call: the step keeps the older version, which counts for its
  staleness, and its extras have both.
- If the engine does not answer, the step keeps the version before the call, without a span: no token is older.
- If the engine has weights that nobody knows, the step is quarantined.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replica import EngineReplica
from stepwell.steps.step import JsonObject, Step, VersionSpan

BRACKET = "version_bracket"
"""The key, in a step's extras, of the versions before and after a call during which the weights changed."""
UNKNOWN_WEIGHTS = "version_unknown: a weight sync found that the engine has other weights than the trainer"


class VersionConfirmer:
    """Completes steps with their versions after they were recorded and before they are sent."""

    def __init__(self, engines: EngineFleet) -> None:
        self._engines = engines
        self._sampled_by: dict[str, EngineReplica] = {}
        self._after: dict[str, int | str | None] = {}
        """The version after a step, or why nobody knows it."""

    def note(self, steps: Sequence[Step], engine: EngineReplica) -> None:
        """Remember which engine wrote steps, until their version is confirmed."""
        if engine.facts.weight_versions:
            for step in steps:
                if not step.version_spans:
                    self._sampled_by[step.uid] = engine

    async def confirm(self, steps: Sequence[Step]) -> list[Step]:
        """The steps with their versions. Each engine is asked once; asking again for the same steps changes nothing."""
        unconfirmed = {
            step.uid: engine for step in steps if (engine := self._sampled_by.pop(step.uid, None)) is not None
        }
        engines = tuple(set(unconfirmed.values()))
        versions = await asyncio.gather(*(self._engines.version_after(engine) for engine in engines))
        version_of = {
            engine: UNKNOWN_WEIGHTS if engine.has_unknown_weights else version
            for engine, version in zip(engines, versions, strict=True)
        }
        self._after.update((uid, version_of[engine]) for uid, engine in unconfirmed.items())
        return [_confirmed(step, self._after.get(step.uid)) for step in steps]

    def discard(self, step: Step) -> None:
        """The step was delivered or given up."""
        self._sampled_by.pop(step.uid, None)
        self._after.pop(step.uid, None)


def _confirmed(step: Step, after: int | str | None) -> Step:
    if after is None:
        return step
    if isinstance(after, str):
        return replace(step, quarantine=step.quarantine or after)
    if after == step.policy_version:
        return replace(step, version_spans=(VersionSpan(after, 0, len(step.response_ids)),))
    extras: JsonObject = {**step.extras, BRACKET: [step.policy_version, after]}
    return replace(step, policy_version=min(step.policy_version, after), extras=extras)
