"""What was sampled, on its way to the recorder: made into steps, graded, counted."""

import asyncio
from collections.abc import Sequence

from stepwell.common.tokenizers import BackgroundTokenizer
from stepwell.engines.replica import EngineReplica
from stepwell.gateway.dialects.dialect import Call
from stepwell.gateway.http.metrics import Sight
from stepwell.gateway.recording.outbox import Recorder
from stepwell.gateway.recording.recorded import CallContext, recorded_steps
from stepwell.gateway.recording.version_confirmer import Versions
from stepwell.gateway.trajectories import TrajectoryRef
from stepwell.steps.step import Exactness, JsonObject
from stepwell.wire.openai import NO_USAGE, Sampled, Usage

MALFORMED_HISTORY = "malformed_history"
"""In a step's extras: how many tool calls in its history had arguments that are no JSON object."""


class Recording:
    def __init__(
        self,
        recorder: Recorder,
        versions: Versions,
        tokenizer: BackgroundTokenizer,
        sight: Sight,
        *,
        prompt_length: int,
        is_durable: bool,
    ) -> None:
        """`is_durable`: an answer's end waits until the pool has confirmed its step."""
        self._recorder = recorder
        self._versions = versions
        self._tokenizer = tokenizer
        self._sight = sight
        self._prompt_length = prompt_length
        self._is_durable = is_durable

    def context(
        self, ref: TrajectoryRef, call: Call, engine: EngineReplica, policy_version: int, started_at: float
    ) -> CallContext:
        extras: JsonObject = {MALFORMED_HISTORY: call.malformed_history} if call.malformed_history else {}
        return CallContext(
            trajectory_uid=ref.trajectory_uid,
            prompt_uid=ref.prompt_uid,
            policy_version=policy_version,
            started_at=started_at,
            sampling=call.sampling,
            prompt_length=self._prompt_length,
            untrainable=call.untrainable,
            exactness=Exactness.ENGINE if engine.facts.token_ids else Exactness.RETOKENIZED,
            extras=extras,
            choices_per_prompt=call.choices_per_prompt,
        )

    async def keep(self, context: CallContext, engine: EngineReplica, choices: Sequence[Sampled], usage: Usage) -> None:
        """Hand the steps of a whole answer over."""
        steps = recorded_steps(context, choices, usage)
        for step in steps:
            self._versions.note(step, engine)
        self._sight.steps_recorded(steps)
        if self._is_durable:
            await self._recorder.record_durably(steps)
        else:
            self._recorder.record(steps)

    def keep_cut(self, context: CallContext, choices: Sequence[Sampled]) -> None:
        """Hand over what there is of an answer that did not come to its end. Never waits."""
        cut = [choice for choice in choices if len(choice.response_ids)]
        if cut:
            steps = recorded_steps(context, cut, NO_USAGE)
            self._sight.steps_recorded(steps)
            self._recorder.record(steps)

    async def encoded_again(self, call: Call, choices: Sequence[Sampled], texts: Sequence[str | None]) -> list[Sampled]:
        """The choices of an engine that gives text only, with ids from the tokenizer. Worth less, and graded so."""
        return await asyncio.to_thread(self._tokenizer.encode_again, call.request, choices, texts)
