"""Makes steps of sampled choices: grades them, quarantines those that are inconsistent, and records them."""

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from secrets import token_hex
from types import MappingProxyType
from typing import Any, NamedTuple

from stepwell.common.tokenizers import BackgroundTokenizer
from stepwell.engines.engine import DEFAULT_MODEL
from stepwell.engines.replica import EngineReplica, EngineReply
from stepwell.errors import BadRequest, NotReady
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.metrics import GatewayMetrics
from stepwell.gateway.recording.outbox import Outbox
from stepwell.gateway.recording.redaction import REDACTION_FAILED, RedactionFailed, Redactor
from stepwell.gateway.recording.step_book import VersionConfirmer
from stepwell.steps.step import CUT_SHORT, Exactness, IntArray, JsonObject, Step, VersionSpan, ids_array
from stepwell.steps.trainable import UNKNOWN_MODE, step_fault, untrainable_reason, usage_fault, with_mode
from stepwell.wire.openai import NO_IDS, NO_USAGE, Sampled, Usage, read_ids

log = logging.getLogger("stepwell.gateway")

VERSION, UNKNOWN = "version", "unknown"
"""The mark in a step's extras that the engine cannot tell its version, so policy_version is the pool's at the time of
the call."""


class PromptOrigin(NamedTuple):
    """Where the prompt of a call comes from, and what its steps keep for calls that continue them."""

    prompt_made: str = ""
    conversation_digests: Sequence[JsonObject] = ()
    """One for each choice; none without a bridge."""


NO_ORIGIN = PromptOrigin()
NOTHING: JsonObject = MappingProxyType({})


class PendingStep(NamedTuple):
    """The facts of a call's steps that are known before its answer, under the names of Step."""

    trajectory_uid: str = ""
    """Empty if the call is not recorded."""
    prompt_uid: str = ""
    uid: str = ""
    """The uid of the first step."""
    policy_version: int = 0
    started_at: float = 0.0
    sampling: JsonObject = NOTHING
    temperature: float | None = None
    untrainable: str | None = None
    extras: JsonObject = NOTHING


@dataclass(slots=True, kw_only=True)
class StepBuilder:
    outbox: Outbox
    confirmer: VersionConfirmer
    tokenizer: BackgroundTokenizer
    metrics: GatewayMetrics
    prompt_length: int
    """The longest prompt that a trainer takes."""
    trained_model: str
    """The model or adapter that is trained; empty for the first one of the engine."""
    is_durable: bool
    """The end of an answer waits until the pool has confirmed its step."""
    redactor: Redactor | None = None
    """None: steps are stored as they are."""

    async def build(
        self,
        pending: PendingStep,
        call: ModelCall,
        reply: EngineReply,
        choices: Sequence[Sampled],
        usage: Usage,
        texts: Callable[[], Sequence[str | None]],
        origin: PromptOrigin = NO_ORIGIN,
    ) -> list[Step]:
        """The steps of a complete answer. If the engine gives only texts, the tokenizer makes their ids."""
        if not reply.engine.facts.token_ids:
            choices = await asyncio.to_thread(_retokenize, self.tokenizer, call.request, choices, texts())
        return build_steps(
            pending,
            _with_adapter_version(call, choices),
            usage,
            told=self.told_by_engine(pending, call, reply),
            choices_per_prompt=call.choices_per_prompt,
            # only an environment, whose call names no trajectory, knows the longest prompt of its trainer
            prompt_length=self.prompt_length if pending.trajectory_uid else sys.maxsize,
            origin=origin,
        )

    async def redact(self, steps: Sequence[Step]) -> Sequence[Step]:
        """The steps as they may be stored: none if that cannot be found out."""
        if self.redactor is None:
            return steps
        try:
            return await self.redactor.redact(steps)
        except RedactionFailed as why:
            self.outbox.lost[REDACTION_FAILED] += len(steps)
            log.error("%d steps of trajectory %s are not stored: %s", len(steps), steps[0].trajectory_uid, why)
            return ()

    async def redact_submitted(self, steps: Sequence[Step]) -> Sequence[Step]:
        """The same for steps of a client that can send them again."""
        redacted = await self.redact(steps)
        if len(redacted) < len(steps):
            raise NotReady("the redaction function failed, so the steps are not stored; see the gateway's log")
        return redacted

    async def record(self, steps: Sequence[Step], engine: EngineReplica) -> None:
        """Steps that are redacted already."""
        self.confirmer.note(steps, engine)
        self.metrics.steps_recorded(steps)
        if self.is_durable:
            await self.outbox.record_durably(steps)
        else:
            self.outbox.record(steps)

    async def confirm(self, steps: Sequence[Step], engine: EngineReplica) -> list[Step]:
        """The steps of a call that is not recorded, with their versions."""
        try:
            self.confirmer.note(steps, engine)
            return await self.confirmer.confirm(steps)
        finally:
            for step in steps:
                self.confirmer.discard(step)

    async def record_cut_short(
        self,
        pending: PendingStep,
        call: ModelCall,
        reply: EngineReply,
        choices: Sequence[Sampled],
        *,
        by_agent: bool,
        origin: PromptOrigin = NO_ORIGIN,
    ) -> None:
        """Record what there is of an answer that has no end. Waits for nothing but the redaction.

        If its agent left, the tokens are a sample of the policy that ended early, as at `max_tokens`, and are trained.
        What an engine broke off is quarantined.
        """
        cut = [choice for choice in _with_adapter_version(call, choices) if len(choice.response_ids)]
        if by_agent:
            cut = [replace(choice, finish_reason=choice.finish_reason or CUT_SHORT) for choice in cut]
        if cut:
            told = self.told_by_engine(pending, call, reply)
            built = build_steps(pending, cut, NO_USAGE, told=told, prompt_length=self.prompt_length, origin=origin)
            steps = await self.redact(built)
            self.confirmer.note(steps, reply.engine)
            self.metrics.steps_recorded(steps)
            self.outbox.record(steps)

    def told_by_engine(self, pending: PendingStep, call: ModelCall, reply: EngineReply) -> dict[str, Any]:
        """The fields of a step that the engine decides. The pool's version counts for an engine that cannot tell its
        own.

        Before the first sync an engine has the weights that it was started with, version 0; after it, it would get no
        call.
        """
        facts, asked = reply.engine.facts, call.request.get("model")
        model = facts.model if asked in (None, DEFAULT_MODEL) else str(asked)
        trained_model = self.trained_model or (facts.model if facts.token_ids else "")
        if call.policy is not None:
            trained_model = call.policy.adapter
        is_version_unknown = reply.version_before is None and not facts.reports_version
        untrainable = pending.untrainable or untrainable_reason(
            call.request,
            model=model,
            trained_model=trained_model,
            logprobs_mode=facts.logprobs_mode or UNKNOWN_MODE,
        )
        return {
            "policy_version": pending.policy_version if is_version_unknown else reply.version_before or 0,
            "exactness": Exactness.ENGINE if facts.token_ids else Exactness.RETOKENIZED,
            "untrainable": untrainable,
            "model": model,
            "sampling": with_mode(pending.sampling, facts.logprobs_mode),
            "extras": {**pending.extras, VERSION: UNKNOWN} if is_version_unknown else pending.extras,
        }


def _with_adapter_version(call: ModelCall, choices: Sequence[Sampled]) -> Sequence[Sampled]:
    """The choices of a call to an adapter, each with the adapter's version for all its tokens."""
    if call.policy is None:
        return choices
    version = call.policy.version
    return [
        replace(
            choice,
            version_spans=(VersionSpan(version, 0, len(choice.response_ids)),) if len(choice.response_ids) else (),
        )
        for choice in choices
    ]


def build_steps(
    pending: PendingStep,
    choices: Sequence[Sampled],
    usage: Usage,
    *,
    prompt_length: int,
    choices_per_prompt: int = 1,
    told: Mapping[str, Any] = NOTHING,
    origin: PromptOrigin = NO_ORIGIN,
) -> list[Step]:
    """One step per choice. If the token count of the engine differs, all of them are quarantined.

    `told` has fields that replace those of the pending step.
    """
    written = sum(len(choice.response_ids) for choice in choices)
    read = sum(len(choice.prompt_ids) for choice in choices[::choices_per_prompt])
    miscount = usage_fault("prompt", read, usage.prompt_tokens) or usage_fault(
        "response", written, usage.completion_tokens
    )
    uids = (pending.uid or token_hex(16), *(token_hex(16) for _ in choices[1:]))
    named: list[dict[str, Any]] = [{**told, "uid": uid} for uid in uids]
    if origin.prompt_made:
        for place, fields in enumerate(named):
            digest = origin.conversation_digests[place] if place < len(origin.conversation_digests) else {}
            fields |= {"prompt_made": origin.prompt_made, "lineage": digest}
    return [
        _build_step(pending, fields, choice, miscount, prompt_length)
        for fields, choice in zip(named, choices, strict=False)
    ]


def _build_step(
    pending: PendingStep, told: Mapping[str, Any], choice: Sampled, miscount: str | None, prompt_length: int
) -> Step:
    sampled: dict[str, Any] = {
        "prompt_ids": choice.prompt_ids,
        "response_ids": choice.response_ids,
        "response_logprobs": choice.logprobs,
        "version_spans": choice.version_spans,
        "finish_reason": choice.finish_reason,
    }
    if choice.version_spans:
        sampled["policy_version"] = choice.version_spans[0].version
    if choice.model:
        sampled["model"] = choice.model
    step = Step(**{**pending._asdict(), **told, **sampled})
    fault = step_fault(step) or miscount or _answer_fault(step, prompt_length)
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
        prompt_ids = _encode_prompt(tokenizer.encoder(), request)
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
    """Encodes the response with the token that ends the turn, which is sampled but not shown, unless the
    log-probabilities have none for it."""
    try:
        encoder = tokenizer.encoder()
    except (NotReady, BadRequest):
        return NO_IDS
    ids, end = encoder.encode(text, add_special_tokens=False), encoder.eos_token_id
    logprob_count = None if choice.logprobs is None else len(choice.logprobs)
    is_ended = choice.finish_reason == "stop" and end is not None and logprob_count != len(ids)
    return ids_array([*ids, end] if is_ended else ids)
