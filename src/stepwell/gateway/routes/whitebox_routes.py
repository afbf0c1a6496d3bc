"""Routes for white-box agents, which tokenize, build steps and submit them by themselves."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from stepwell.access.caller import Caller, caller_of
from stepwell.common.tokenizers import BackgroundTokenizer
from stepwell.engines.engine import Generated
from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replica import RefusedReply
from stepwell.errors import BadRequest, EngineUnavailable, NotReady
from stepwell.gateway.calls import UNRECORDED_HEADER, Unrecorded
from stepwell.gateway.dialects.request_rules import make_explicit
from stepwell.gateway.error_responses import relay
from stepwell.gateway.metrics import GatewayMetrics
from stepwell.gateway.recording.step_builder import PendingStep, build_steps
from stepwell.pool.api.producing import TRAIN, SubmitVerdict
from stepwell.pool.api.scoring import RewardRequest, RewardScorer
from stepwell.pool.client import PoolClient
from stepwell.steps.step import Exactness, Step, ids_array
from stepwell.steps.trainable import LeftOutLog, step_fault, with_distribution, with_mode
from stepwell.wire import gateway_api


def whitebox_router(
    pool: PoolClient,
    engines: EngineFleet,
    tokenizer: BackgroundTokenizer,
    rewards: RewardScorer | None,
    metrics: GatewayMetrics,
    left_out: LeftOutLog,
    redact: Callable[[Sequence[Step]], Awaitable[Sequence[Step]]],
    *,
    prompt_length: int,
    response_length: int,
    trained_model: str,
) -> APIRouter:
    """`redact` gives the steps as they may be stored."""
    router, generations = APIRouter(), Generations()

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
        steps = [generations.complete(step.to_step()) for step in wanted.steps]
        faults = [f"steps.{i}: {fault}" for i, step in enumerate(steps) if (fault := step_fault(step))]
        if faults:
            raise BadRequest("; ".join(faults))
        await _check_channels(caller_of(request.scope), channel, steps, pool)
        steps = [with_distribution(step, trained_model or engines.model) for step in await redact(steps)]
        left_out.note(channel, [step.untrainable for step in steps])
        verdicts = await pool.submit_steps(steps, channel=channel, group_size=group_size)
        refused = {str(v): verdicts.count(v) for v in set(verdicts) if v is not SubmitVerdict.ACCEPTED}
        return gateway_api.StepsSubmitted(accepted=verdicts.count(SubmitVerdict.ACCEPTED), refused=refused)

    @router.post("/compute_reward")
    async def compute_reward(wanted: gateway_api.ComputeReward) -> gateway_api.RewardComputed:
        """Ask the reward worker."""
        if rewards is None:
            raise NotReady("no reward worker; start the gateway with --reward-worker-name")
        return await _computed_reward(wanted, rewards, tokenizer)

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
