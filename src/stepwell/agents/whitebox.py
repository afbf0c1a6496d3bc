"""White-box agents: they tokenize, sample from token ids, and submit steps that they build themselves.

    class Echo(AgentFlowBase):
        async def run(self, rollout):
            prompt_ids = tokenizer.encode(rollout.sample["question"])
            answer = await self.generate(prompt_ids, {"temperature": 1.0})
            await self.submit([self.step(rollout, 0, answer)])
            return float(tokenizer.decode(answer.token_ids) == rollout.sample["answer"])

The agent brings its tokenizer. The end of `run` completes the trajectory, not a step marked as the last one, so the
reward that `run` returns is never late.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from stepwell.agents.gateway_client import SAMPLING
from stepwell.agents.rollout import AgentFlow, Rollout, made, portable
from stepwell.errors import Conflict
from stepwell.steps.step import Json, JsonObject, VersionSpan
from stepwell.wire import gateway_api as shapes

DUPLICATE = "duplicate"
"""The refusal that means that the pool already has the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The tokens that an engine sampled from a prompt."""

    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str | None
    policy_version: int
    """The version that sampled the oldest token."""
    version_spans: tuple[VersionSpan, ...]
    sampling: Mapping[str, Any]
    """The parameters in force."""
    model: str = ""
    """The name of the model or adapter that answered; empty if the engine does not report it."""
    temperature: float | None = None


class AgentFlowBase(AgentFlow):
    """Subclasses write `run`."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Mapping[str, Any] | None = None) -> Generation:
        wanted = made(shapes.Generate, prompt_ids=list(prompt_ids), sampling_params=dict(sampling or {}))
        done = await self.gateway.ask("POST", "/generate", shapes.GenerationDone, wanted, SAMPLING)
        return Generation(
            prompt_ids=wanted.prompt_ids,
            token_ids=done.token_ids,
            log_probs=done.log_probs,
            stop_reason=done.stop_reason,
            policy_version=done.policy_version,
            version_spans=tuple(done.version_spans),
            sampling=done.sampling or wanted.sampling_params,
            model=done.model,
            temperature=done.temperature,
        )

    def step(
        self,
        rollout: Rollout,
        index: int,
        generation: Generation,
        *,
        reward: float | None = None,
        response_mask: Sequence[bool] | None = None,
        extras: JsonObject | None = None,
    ) -> shapes.SubmittedStep:
        """The generation as the rollout's step number `index`, with its own reward if it has one."""
        return made(
            shapes.SubmittedStep,
            prompt_ids=generation.prompt_ids,
            response_ids=generation.token_ids,
            trajectory_uid=rollout.trajectory_uid,
            prompt_uid=rollout.prompt_uid,
            step_index=index,
            reward=reward,
            policy_version=generation.policy_version,
            response_logprobs=generation.log_probs,
            response_mask=None if response_mask is None else list(response_mask),
            version_spans=[tuple(span) for span in generation.version_spans],
            finish_reason=generation.stop_reason,
            sampling=dict(generation.sampling),
            extras=dict(extras or {}),
            model=generation.model,
            temperature=generation.temperature,
        )

    async def submit(self, steps: Sequence[shapes.SubmittedStep]) -> None:
        """Submit steps. Conflict says how many the pool refused and why; a duplicate is not a conflict."""
        query = urlencode({"channel": self.channel, "group_size": self.group_size})
        submitted = shapes.SubmitSteps(steps=list(steps))
        told = await self.gateway.ask("POST", f"/submit_steps?{query}", shapes.StepsSubmitted, submitted)
        refused = ", ".join(f"{count} {cause}" for cause, count in told.refused.items() if cause != DUPLICATE)
        if refused:
            raise Conflict(f"the pool refused steps: {refused}")

    async def compute_reward(
        self,
        rollout: Rollout,
        generation: Generation,
        *,
        num_turns: int = 1,
        extra_fields: Mapping[str, Json] | None = None,
    ) -> shapes.RewardComputed:
        """Ask the gateway's reward worker, which also gets the sample."""
        wanted = made(
            shapes.ComputeReward,
            prompt_ids=generation.prompt_ids,
            response_ids=generation.token_ids,
            num_turns=num_turns,
            extra_fields=dict(extra_fields or {}),
            dataset_fields=portable(rollout.sample),
        )
        return await self.gateway.ask("POST", "/compute_reward", shapes.RewardComputed, wanted, SAMPLING)
