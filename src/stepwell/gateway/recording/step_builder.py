"""Makes steps of sampled choices: grades them, quarantines those that are inconsistent, and records them."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any

from stepwell.common.tokenizers import BackgroundTokenizer
from stepwell.engines.replica import EngineReplica
from stepwell.engines.replies import EngineReply
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.http.metrics import GatewayMetrics
from stepwell.gateway.recording.outbox import Outbox
from stepwell.gateway.recording.version_confirmer import VersionConfirmer
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.steps.soundness import step_fault, usage_fault
from stepwell.steps.step import Exactness, IntArray, JsonObject, Step, ids_array
from stepwell.wire.openai import NO_IDS, NO_USAGE, Sampled, Usage, read_ids

log = logging.getLogger("stepwell.gateway")

MALFORMED_HISTORY = "malformed_history"
"""In a step's extras: how many tool calls in its history had arguments that are not a JSON object."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """What is known of a call before its answer."""

    trajectory_uid: str
    prompt_uid: str
    policy_version: int
    """In force when the call began: no token of the answer is older."""
    started_at: float
    sampling: JsonObject
    prompt_length: int
    """The longest prompt that a trainer takes."""
    untrainable: str | None = None
    exactness: Exactness = Exactness.ENGINE
    extras: JsonObject = field(default_factory=dict)
    choices_per_prompt: int = 1


class StepBuilder:
    def __init__(
        self,
        outbox: Outbox,
        confirmer: VersionConfirmer,
        tokenizer: BackgroundTokenizer,
        metrics: GatewayMetrics,
        *,
        prompt_length: int,
        is_durable: bool,
    ) -> None:
        """`is_durable`: the end of an answer waits until the pool has confirmed its step."""
        self._outbox = outbox
        self._confirmer = confirmer
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._prompt_length = prompt_length
        self._is_durable = is_durable

    def context(
        self,
        ref: TrajectoryRef,
        call: ModelCall,
        reply: EngineReply,
        policy_version: int,
        started_at: float,
        untrainable: str | None,
    ) -> CallContext:
        """`policy_version` counts if the engine does not tell its own."""
        extras: JsonObject = {MALFORMED_HISTORY: call.malformed_history} if call.malformed_history else {}
        return CallContext(
            trajectory_uid=ref.trajectory_uid,
            prompt_uid=ref.prompt_uid,
            policy_version=policy_version if reply.version_before is None else reply.version_before,
            started_at=started_at,
            sampling=call.sampling,
            prompt_length=self._prompt_length,
            untrainable=untrainable,
            exactness=Exactness.ENGINE if reply.engine.facts.token_ids else Exactness.RETOKENIZED,
            extras=extras,
            choices_per_prompt=call.choices_per_prompt,
        )

    async def record(
        self, context: CallContext, engine: EngineReplica, choices: Sequence[Sampled], usage: Usage
    ) -> None:
        """Record the steps of a complete answer."""
        steps = build_steps(context, choices, usage)
        for step in steps:
            self._confirmer.note(step, engine)
        self._metrics.steps_recorded(steps)
        if self._is_durable:
            await self._outbox.record_durably(steps)
        else:
            self._outbox.record(steps)

    def record_cut_short(self, context: CallContext, choices: Sequence[Sampled]) -> None:
        """Record what there is of an answer that has no end. Never waits."""
        cut = [choice for choice in choices if len(choice.response_ids)]
        if cut:
            steps = build_steps(context, cut, NO_USAGE)
            self._metrics.steps_recorded(steps)
            self._outbox.record(steps)

    async def with_ids(
        self,
        context: CallContext,
        call: ModelCall,
        choices: Sequence[Sampled],
        texts: Callable[[], Sequence[str | None]],
    ) -> Sequence[Sampled]:
        """The choices; if the engine gives only texts, with ids from the tokenizer."""
        if context.exactness is Exactness.ENGINE:
            return choices
        return await asyncio.to_thread(_retokenize, self._tokenizer, call.request, choices, texts())


def build_steps(context: CallContext, choices: Sequence[Sampled], usage: Usage) -> list[Step]:
    """One step per choice. If the token count of the engine differs, all of them are quarantined."""
    written = sum(len(choice.response_ids) for choice in choices)
    read = sum(len(choice.prompt_ids) for choice in choices[:: context.choices_per_prompt])
    miscount = usage_fault("prompt", read, usage.prompt_tokens) or usage_fault(
        "response", written, usage.completion_tokens
    )
    return [_build_step(context, choice, miscount) for choice in choices]


def _build_step(context: CallContext, choice: Sampled, miscount: str | None) -> Step:
    step = Step(
        prompt_ids=choice.prompt_ids,
        response_ids=choice.response_ids,
        response_logprobs=choice.logprobs,
        trajectory_uid=context.trajectory_uid,
        prompt_uid=context.prompt_uid,
        policy_version=choice.version_spans[0].version if choice.version_spans else context.policy_version,
        exactness=context.exactness,
        untrainable=context.untrainable,
        finish_reason=choice.finish_reason,
        model=choice.model,
        version_spans=choice.version_spans,
        sampling=context.sampling,
        extras=context.extras,
        uid=token_hex(16),
        started_at=context.started_at,
    )
    fault = step_fault(step) or miscount or _answer_fault(step, context.prompt_length)
    # log-probabilities that do not fit their ids cannot be packed; the fault says what they were
    return step if fault is None else replace(step, response_logprobs=None, quarantine=fault)


def _answer_fault(step: Step, prompt_length: int) -> str | None:
    if step.response_logprobs is None and step.exactness is Exactness.ENGINE:
        return "no_logprobs: the engine gave no log-probabilities"
    if len(step.prompt_ids) > prompt_length:
        return f"prompt_too_long: {len(step.prompt_ids)} prompt tokens, and a trainer takes {prompt_length}"
    if step.finish_reason is None:
        return "cut_short: the answer did not come to its end"
    if step.finish_reason in ("abort", "error"):
        return f"cut_short: the engine ended the answer with {step.finish_reason!r}"
    return None


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
