"""Routes for white-box agents, which tokenize, build steps and submit them by themselves."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request, Response

from stepwell.access.caller import Caller, caller_of
from stepwell.common.tokenizers import BackgroundTokenizer
from stepwell.engines.engine import Generated
from stepwell.engines.replica import RefusedReply
from stepwell.errors import BadRequest, EngineUnavailable, NotReady
from stepwell.gateway.calls import UNRECORDED_HEADER, Unrecorded
from stepwell.gateway.dialects.request_rules import make_explicit
from stepwell.gateway.error_responses import relay
from stepwell.gateway.recording.step_builder import PendingStep, StepBuilder, build_steps
from stepwell.pool.api.producing import TRAIN, SubmitVerdict
from stepwell.pool.api.scoring import RewardRequest, RewardScorer
from stepwell.pool.client import PoolClient
from stepwell.steps.step import Exactness, JsonObject, Step, VersionSpan, ids_array
from stepwell.steps.trainable import LeftOutLog, step_fault, with_distribution, with_mode
from stepwell.wire import gateway_api

MOST_GENERATIONS = 20_000
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
    """The generations that white-box agents asked this gateway for.

    - An agent may submit no more than tokens, with their log-probabilities or without. A step that has exactly those of
      a generation gets what the agent leaves out: temperature and sampling parameters, versions, model.
    - If the same tokens were generated in two ways, what differs is not known.
    - Only this process knows what it has answered: another gateway, or another worker of this one, does not.
    """

    def __init__(self, most: int = MOST_GENERATIONS) -> None:
        self._most = 2 * most
        self._told: OrderedDict[bytes, Told] = OrderedDict()
        """Each generation under two names: with its log-probabilities and without."""

    def add(self, step: Step, told: Told) -> None:
        """`step` has the tokens and the log-probabilities."""
        for name in (_tokens_digest(step), _tokens_digest(replace(step, response_logprobs=None))):
            self._told[name] = told.common(self._told.pop(name, told))
        while len(self._told) > self._most:
            self._told.popitem(last=False)

    def complete(self, step: Step) -> Step:
        """Completes the step; what it says itself stays. Versions are told by both of its fields, or by none;
        temperature and sampling parameters likewise."""
        told = self._told.get(_tokens_digest(step))
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


def _tokens_digest(step: Step) -> bytes:
    digest = blake2b(digest_size=16)
    for array in (step.prompt_ids, step.response_ids):
        digest.update(len(array).to_bytes(8))
        digest.update(np.ascontiguousarray(array, np.int32).tobytes())
    if step.response_logprobs is not None:
        digest.update(np.ascontiguousarray(step.response_logprobs, np.float32).tobytes())
    return digest.digest()


def whitebox_router(
    pool: PoolClient, steps: StepBuilder, rewards: RewardScorer | None, left_out: LeftOutLog, response_length: int
) -> APIRouter:
    router, generations = APIRouter(), Generations()
    engines, metrics, prompt_length = steps.engines, steps.metrics, steps.prompt_length

    @router.post("/generate", response_model=gateway_api.GenerationDone)
    async def generate(wanted: gateway_api.Generate, response: Response) -> gateway_api.GenerationDone | Response:
        """Sample from token ids; what could not be trained on is refused."""
        sampling = _explicit_sampling(wanted, prompt_length, response_length)
        began = time.time()
        generated = await engines.generate(wanted.prompt_ids, sampling)
        if isinstance(generated, RefusedReply):
            return relay(generated.status, generated.body)
        metrics.calls_unrecorded[Unrecorded.URL].inc()
        response.headers[UNRECORDED_HEADER.decode()] = Unrecorded.URL
        written = len(generated.sampled.response_ids)
        metrics.call_done("generate", 200, time.time() - began, None, len(wanted.prompt_ids), written)
        return _generation(wanted, generated, sampling, prompt_length, generations)

    @router.post("/submit_steps")
    async def submit_steps(
        request: Request,
        wanted: gateway_api.SubmitSteps,
        channel: Annotated[gateway_api.ChannelName, Query()] = TRAIN,
        group_size: Annotated[gateway_api.GroupSize | None, Query()] = None,
    ) -> gateway_api.StepsSubmitted:
        """Hand in steps of the agent's own making; one with is_last completes its trajectory."""
        given = [generations.complete(step.to_step()) for step in wanted.steps]
        faults = [f"steps.{i}: {fault}" for i, step in enumerate(given) if (fault := step_fault(step))]
        if faults:
            raise BadRequest("; ".join(faults))
        await _check_channels(caller_of(request.scope), channel, given, pool)
        trained_model = steps.trained_model or engines.model
        submitted = [with_distribution(step, trained_model) for step in await steps.redact_submitted(given)]
        left_out.note(channel, [step.untrainable for step in submitted])
        verdicts = await pool.submit_steps(submitted, channel=channel, group_size=group_size)
        refused = {str(v): verdicts.count(v) for v in set(verdicts) if v is not SubmitVerdict.ACCEPTED}
        return gateway_api.StepsSubmitted(accepted=verdicts.count(SubmitVerdict.ACCEPTED), refused=refused)

    @router.post("/compute_reward")
    async def compute_reward(wanted: gateway_api.ComputeReward) -> gateway_api.RewardComputed:
        """Ask the reward worker."""
        if rewards is None:
            raise NotReady("no reward worker; start the gateway with --reward-worker-name")
        return await _computed_reward(wanted, rewards, steps.tokenizer)

    return router


def _explicit_sampling(wanted: gateway_api.Generate, prompt_length: int, response_length: int) -> dict[str, Any]:
    if len(wanted.prompt_ids) > prompt_length:
        raise BadRequest(f"{len(wanted.prompt_ids)} prompt tokens are more than --prompt-length {prompt_length}")
    sampling = dict(wanted.sampling_params)
    if sampling.get("n") not in (None, 1):
        raise BadRequest("n must be 1: one generation is answered with one sequence of tokens")
    make_explicit(sampling, response_length)
    return sampling


async def _computed_reward(
    wanted: gateway_api.ComputeReward, rewards: RewardScorer, tokenizer: BackgroundTokenizer
) -> gateway_api.RewardComputed:
    fields = wanted.model_dump()
    if images := fields.pop("multi_modal_data"):
        fields["extra_fields"] = {"multi_modal_data": images, **wanted.extra_fields}
    prompt_text = await asyncio.to_thread(tokenizer.decode, wanted.prompt_ids)
    response_text = await asyncio.to_thread(tokenizer.decode, wanted.response_ids)
    score = await rewards.compute_reward(RewardRequest(**fields, prompt_text=prompt_text, response_text=response_text))
    return gateway_api.RewardComputed.model_validate(score, from_attributes=True)


async def _check_channels(caller: Caller, channel: str, steps: Sequence[Step], pool: PoolClient) -> None:
    """NotPermitted if the caller's key is not for the channel, or for that of a trajectory that is there already."""
    caller.require_channel(channel)
    if caller.is_scoped:
        for trajectory_uid, prompt_uid in dict.fromkeys((step.trajectory_uid, step.prompt_uid) for step in steps):
            if (found := await pool.channel_of(trajectory_uid, prompt_uid)) is not None:
                caller.require_channel(found)


def _generation(
    wanted: gateway_api.Generate,
    generated: Generated,
    sampling: dict[str, Any],
    prompt_length: int,
    generations: Generations,
) -> gateway_api.GenerationDone:
    """The answer. EngineUnavailable if no sound step can be built from it."""
    exact = {"exactness": Exactness.ENGINE}
    (step,) = build_steps(PendingStep(), [generated.sampled], generated.usage, told=exact, prompt_length=prompt_length)
    if step.quarantine is not None or step.response_logprobs is None:
        raise EngineUnavailable(f"the engine's answer cannot be trained on: {step.quarantine}")
    versions = [span.version for span in generated.version_spans]
    told = Told(
        policy_version=min(versions, default=generated.version or 0),
        version_spans=tuple(generated.version_spans),
        sampling=dict(with_mode(sampling, generated.logprobs_mode)),
        temperature=sampling["temperature"],
        model=generated.sampled.model,
        finish_reason=step.finish_reason,
    )
    generations.add(replace(step, prompt_ids=ids_array(wanted.prompt_ids)), told)
    return gateway_api.GenerationDone(
        token_ids=step.response_ids.tolist(),
        log_probs=step.response_logprobs.tolist(),
        stop_reason=told.finish_reason,
        policy_version=told.policy_version,
        version_spans=list(told.version_spans),
        model=told.model,
        temperature=told.temperature,
        sampling=dict(told.sampling),
    )
