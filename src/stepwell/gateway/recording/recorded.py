"""What was seen on the wire, as Steps: checked, and quarantined with the reason where it does not add up."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex

from stepwell.steps.soundness import step_fault, usage_fault
from stepwell.steps.step import Exactness, JsonObject, Step
from stepwell.wire.openai import Sampled, Usage


@dataclass(frozen=True, slots=True)
class CallContext:
    """What is known of a call before its answer."""

    trajectory_uid: str
    prompt_uid: str
    policy_version: int
    """In force when the call began, so of no token newer than the oldest."""
    started_at: float
    sampling: JsonObject
    prompt_length: int
    """The longest prompt a trainer will take."""
    untrainable: str | None = None
    exactness: Exactness = Exactness.ENGINE
    extras: JsonObject = field(default_factory=dict)
    choices_per_prompt: int = 1


def build_steps(context: CallContext, choices: Sequence[Sampled], usage: Usage) -> list[Step]:
    """One step a choice. A count that does not fit condemns all: no one can tell which of them it speaks of."""
    written = sum(len(choice.response_ids) for choice in choices)
    read = sum(len(choice.prompt_ids) for choice in choices[:: context.choices_per_prompt])
    miscount = usage_fault("prompt", read, usage.prompt_tokens) or usage_fault(
        "response", written, usage.completion_tokens
    )
    return [_recorded(context, choice, miscount) for choice in choices]


def _recorded(context: CallContext, choice: Sampled, miscount: str | None) -> Step:
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
    fault = step_fault(step) or miscount or _unfit(step, context.prompt_length)
    # log-probabilities that do not fit their ids could not be packed; the reason says what they were
    return step if fault is None else replace(step, response_logprobs=None, quarantine=fault)


def _unfit(step: Step, prompt_length: int) -> str | None:
    if step.response_logprobs is None and step.exactness is Exactness.ENGINE:
        return "no_logprobs: the engine gave no log-probabilities"
    if len(step.prompt_ids) > prompt_length:
        return f"prompt_too_long: {len(step.prompt_ids)} prompt tokens, and a trainer takes {prompt_length}"
    if step.finish_reason is None:
        return "cut_short: the answer did not come to its end"
    if step.finish_reason in ("abort", "error"):
        return f"cut_short: the engine ended the answer with {step.finish_reason!r}"
    return None
