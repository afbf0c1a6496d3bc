"""What was sampled, on its way to the recorder: made into steps, graded, counted."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepwell.common.tokenizers import BackgroundTokenizer
from stepwell.engines.replica import EngineReplica
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.http.metrics import GatewayMetrics
from stepwell.gateway.recording.outbox import Outbox
from stepwell.gateway.recording.recorded import CallContext, build_steps
from stepwell.gateway.recording.version_confirmer import VersionConfirmer
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.steps.step import Exactness, IntArray, JsonObject, ids_array
from stepwell.wire.openai import NO_IDS, NO_USAGE, Sampled, Usage, read_ids

log = logging.getLogger("stepwell.gateway")

MALFORMED_HISTORY = "malformed_history"
"""In a step's extras: how many tool calls in its history had arguments that are no JSON object."""


class StepBuilder:
    def __init__(
        self,
        recorder: Outbox,
        versions: VersionConfirmer,
        tokenizer: BackgroundTokenizer,
        sight: GatewayMetrics,
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
        self, ref: TrajectoryRef, call: ModelCall, engine: EngineReplica, policy_version: int, started_at: float
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
        steps = build_steps(context, choices, usage)
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
            steps = build_steps(context, cut, NO_USAGE)
            self._sight.steps_recorded(steps)
            self._recorder.record(steps)

    async def retokenize(
        self, call: ModelCall, choices: Sequence[Sampled], texts: Sequence[str | None]
    ) -> list[Sampled]:
        """The choices of an engine that gives text only, with ids from the tokenizer. Worth less, and graded so."""
        return await asyncio.to_thread(_retokenize, self._tokenizer, call.request, choices, texts)


def _retokenize(
    tokenizer: BackgroundTokenizer,
    request: Mapping[str, Any],
    choices: Sequence[Sampled],
    texts: Sequence[str | None],
) -> list[Sampled]:
    """The choices with ids made from their texts. A choice whose ids cannot be made has none; its step is refused."""
    try:
        prompt_ids = _encode_prompt(tokenizer.loaded, request)
    except Exception as failure:  # noqa: BLE001 - chat templates raise anything; the agent has its answer already
        log.warning("a prompt cannot be retokenized: %s", " ".join(str(failure).split()))
        prompt_ids = NO_IDS
    return [
        replace(
            choice,
            prompt_ids=prompt_ids,
            response_ids=NO_IDS if text is None else _encode_response(tokenizer, choice, text),
        )
        for choice, text in zip(choices, texts, strict=True)
    ]


def _encode_prompt(tokenizer: Any, request: Mapping[str, Any]) -> IntArray:
    if "messages" not in request:
        prompt = request["prompt"]
        return ids_array(tokenizer.encode(prompt)) if isinstance(prompt, str) else read_ids(prompt)
    text = tokenizer.apply_chat_template(
        request["messages"], tools=request.get("tools"), add_generation_prompt=True, tokenize=False
    )
    return ids_array(tokenizer.encode(text, add_special_tokens=False))


def _encode_response(tokenizer: BackgroundTokenizer, choice: Sampled, text: str) -> IntArray:
    """With the token that ends the turn, which is sampled but not shown, unless the log-probabilities have none for
    it."""
    if tokenizer.why_not_ready() is not None:
        return NO_IDS
    ids, end = tokenizer.loaded.encode(text, add_special_tokens=False), tokenizer.loaded.eos_token_id
    logprob_count = None if choice.logprobs is None else len(choice.logprobs)
    is_ended = choice.finish_reason == "stop" and end is not None and logprob_count != len(ids)
    return ids_array([*ids, end] if is_ended else ids)
