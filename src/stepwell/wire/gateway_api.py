"""The gateway's own endpoints: what is asked and answered, checked as it comes through the door."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints

from stepwell.pool.api.producing import EndResult
from stepwell.steps.step import Step, VersionSpan, ids_array, logprobs_array, mask_array

UID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._~:@-]{0,127}"
Uid = Annotated[str, StringConstraints(pattern=f"^{UID_PATTERN}$")]
"""Stands in a URL as it is: letters, digits and . _ ~ : @ -, the first a letter or digit, 128 at most."""
ChannelName = Annotated[str, StringConstraints(min_length=1, max_length=64)]
GroupSize = Annotated[int, Field(ge=1, le=65536)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenCount = Annotated[int, Field(ge=0, lt=2**31)]
Version = Annotated[int, Field(ge=0, lt=2**63)]
Logprob = Annotated[float, Field(gt=-1e38, lt=1e38)]
"""Fits in 32 bits; whether it can be one is for steps/soundness.py to say."""
JsonFields = dict[str, Any]


class GatewayBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class InitTrajectory(GatewayBody):
    prompt_uid: Uid | None = None
    """The group this rollout belongs to; without one it gets a group of its own."""
    trajectory_uid: Uid | None = None
    channel: ChannelName | None = None
    group_size: GroupSize | None = None
    """How many rollouts make the group complete."""
    metadata: JsonFields = {}


class TrajectoryOpened(GatewayBody):
    trajectory_uid: str
    prompt_uid: str
    base_url: str
    """Give it to the agent as its OpenAI base_url."""
    api_key: str


class RegisterTrajectory(GatewayBody):
    channel: ChannelName | None = None
    metadata: JsonFields = {}


class CompleteTrajectory(GatewayBody):
    reward: FiniteFloat | None = None
    channel: ChannelName | None = None


class AbortTrajectory(GatewayBody):
    reason: str = ""
    """Why the rollout failed; it goes to the log."""


class TrajectoryEnded(GatewayBody):
    status: EndResult


class Feedback(GatewayBody):
    value: FiniteFloat
    """The reward."""
    step_index: int | None = Field(default=None, ge=0, lt=2**31)
    """The step that it is for; without one, it is for the whole trajectory."""
    source: str = Field(default="feedback", min_length=1, max_length=200)
    """Who gives it."""
    note: str = Field(default="", max_length=10_000)
    """Why, in words; it goes to the trajectory's metadata."""


class FeedbackGiven(GatewayBody):
    status: Literal["counted", "late"]
    """counted: it is the reward to train with or, if the trajectory was handed out already, is kept in the archive."""


class Registered(GatewayBody):
    status: str = "registered"


class SubmittedStep(GatewayBody):
    prompt_ids: list[TokenId]
    response_ids: list[TokenId]
    trajectory_uid: Uid
    prompt_uid: Uid
    step_index: int = Field(ge=0, lt=2**31)
    reward: FiniteFloat | None = None
    policy_version: Version = 0
    is_last: bool = False
    metadata: JsonFields = {}
    response_logprobs: list[Logprob] | None = None
    response_mask: list[bool] | None = None
    version_spans: list[tuple[Version, TokenCount, TokenCount]] = []
    """Version, first token, and the token after the last, of each run of tokens that one version wrote."""
    finish_reason: str | None = None
    sampling: JsonFields = {}
    extras: JsonFields = {}

    def to_step(self) -> Step:
        logprobs, mask = self.response_logprobs, self.response_mask
        return Step(
            prompt_ids=ids_array(self.prompt_ids),
            response_ids=ids_array(self.response_ids),
            trajectory_uid=self.trajectory_uid,
            prompt_uid=self.prompt_uid,
            step_index=self.step_index,
            policy_version=self.policy_version,
            reward=self.reward,
            is_last=self.is_last,
            metadata=self.metadata,
            response_logprobs=None if logprobs is None else logprobs_array(logprobs),
            response_mask=None if mask is None else mask_array(mask),
            version_spans=tuple(VersionSpan(*span) for span in self.version_spans),
            finish_reason=self.finish_reason,
            sampling=self.sampling,
            extras=self.extras,
        )


class SubmitSteps(GatewayBody):
    steps: list[SubmittedStep]


class StepsSubmitted(GatewayBody):
    accepted: int
    refused: dict[str, int]
    """By cause: duplicate, late, mixed_indexes."""


class RefillWanted(GatewayBody):
    prompt_uid: str
    missing: int


class PacingNow(GatewayBody):
    may_start: int | None
    """New trajectories that may start without anything becoming too stale; null while no one has trained yet."""
    in_flight: int
    queued: int
    refills: list[RefillWanted]
    """Groups whose deadline passed and that need so many more rollouts."""


class Generate(GatewayBody):
    prompt_ids: list[TokenId] = Field(min_length=1)
    sampling_params: JsonFields = {}


class GenerationDone(GatewayBody):
    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str | None
    policy_version: int
    """Of the oldest token."""
    version_spans: list[VersionSpan]


class ComputeReward(GatewayBody):
    prompt_ids: list[TokenId]
    response_ids: list[TokenId]
    num_turns: int = Field(default=1, ge=0)
    extra_fields: JsonFields = {}
    dataset_fields: JsonFields = {}


class RewardComputed(GatewayBody):
    reward_score: float
    reward_extra_info: JsonFields


class Readiness(GatewayBody):
    ready: bool
    missing: dict[str, str]
    """What is not there yet, and why."""


Address = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/?#]+[^\s?#]*$", max_length=2000)]


class EngineAddress(GatewayBody):
    address: Address
    """http://host:port"""


class EngineNow(GatewayBody):
    address: str
    state: str
    """healthy, paused or down."""
    why: str
    """Why it is down; else empty."""
    in_flight: int
    weight_version: str | None
    server: str
    """The version the server reports; empty for a plain OpenAI server."""


class EngineList(GatewayBody):
    engines: list[EngineNow]
