"""The bodies of the gateway's own routes: requests and answers, validated.

Claw-R1's bodies are accepted too, with its names of fields and its nulls; docs/coming-from-claw-r1.md lists the
differences.
"""

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
    model_validator,
)

from stepwell.pool.api.producing import LAST_STEP, UNFINISHED_REWARD, EndResult
from stepwell.pool.api.sessions import CONSENT, RESERVED_UIDS, RETENTION
from stepwell.steps.step import (
    ARRAY_KINDS,
    READERS,
    REQUIRED,
    STEP_COLUMNS,
    Column,
    ColumnKind,
    ColumnScope,
    Step,
    VersionSpan,
)
from stepwell.steps.trainable import MULTIMODAL

UID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._~:@-]{0,127}"


def _is_no_part_of_urls(uid: str) -> str:
    if uid in RESERVED_UIDS:
        raise ValueError(
            f"{uid!r} is no uid, because other URLs contain it; a base_url is .../TRAJECTORY_UID/PROMPT_UID"
        )
    return uid


def _refused_with(sentence: str) -> WrapValidator:
    """Pydantic would show the pattern instead."""

    def check(value: object, is_valid: ValidatorFunctionWrapHandler) -> Any:
        try:
            return is_valid(value)
        except ValidationError:
            raise ValueError(sentence) from None

    return WrapValidator(check)


Uid = Annotated[
    str,
    StringConstraints(pattern=f"^{UID_PATTERN}$"),
    _refused_with("use at most 128 letters, digits and . _ ~ : @ -, with a letter or digit first"),
    AfterValidator(_is_no_part_of_urls),
]
"""A name that needs no escaping in a URL. It is none of RESERVED_UIDS: a URL that lacks a uid would otherwise name
another trajectory."""
ChannelName = Annotated[str, StringConstraints(min_length=1, max_length=64)]
GroupSize = Annotated[int, Field(ge=1, le=65536)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenCount = Annotated[int, Field(ge=0, lt=2**31)]
Version = Annotated[int, Field(ge=0, lt=2**63)]
Logprob = Annotated[float, Field(gt=-1e38, lt=1e38)]
"""A number that fits in 32 bits; steps/trainable.py decides whether it can be a log-probability."""
MAX_SUBMITTED_STEPS = 4096
"""The most steps in one request: the gateway serves nobody else while it reads them."""
JsonFields = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]


class GatewayBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ConsentGiven(GatewayBody):
    """The consent that the person gave whose data it is."""

    train: bool = True
    """False: the steps are recorded, and no trainer gets them."""
    keep: bool = True
    """False: they are neither archived nor exported, and leave the pool as soon as they are trained."""


class InitTrajectory(GatewayBody):
    prompt_uid: Uid | None = None
    """The group that the rollout belongs to; without one it gets its own group."""
    trajectory_uid: Uid | None = None
    channel: ChannelName | None = None
    group_size: GroupSize | None = None
    """How many rollouts complete the group."""
    metadata: JsonFields = {}
    """Facts that rewards and exports read. With a session key: at most 16 KiB, and kept apart, as `client`."""
    session: bool = False
    """Open a session: a conversation that nobody completes. After a while without a call the pool completes it, and a
    later call under its base_url goes on in a new trajectory."""
    user: str = Field(default="", max_length=200)
    """The user whose session it is."""
    capture: bool = True
    """False: the calls of the session are answered and not recorded."""
    consent: ConsentGiven | None = None
    retention_seconds: FiniteFloat | None = Field(default=None, gt=0)
    """How long the data is kept, if that is less than the pool keeps data."""
    unfinished_reward: FiniteFloat | None = None
    """The reward of the rollout if it is open at its group's deadline; without it, the pool's."""

    @property
    def all_metadata(self) -> dict[str, Any]:
        """The metadata with what the pool reads in it."""
        consent = {} if self.consent is None else {CONSENT: self.consent.model_dump()}
        retention = {} if self.retention_seconds is None else {RETENTION: self.retention_seconds}
        unfinished = {} if self.unfinished_reward is None else {UNFINISHED_REWARD: self.unfinished_reward}
        return {**self.metadata, **consent, **retention, **unfinished}


class TrajectoryOpened(GatewayBody):
    trajectory_uid: str
    prompt_uid: str
    base_url: str
    """The agent's OpenAI base_url."""
    api_key: str


class IssueSessionKey(GatewayBody):
    user: str = Field(min_length=1, max_length=200)
    """A user, or a deployment."""
    capture: bool = True
    """False: calls with this key are answered and not recorded."""


class SessionKeyIssued(GatewayBody):
    user: str
    base_url: str
    """The same for all users."""
    api_key: str


class RegisterTrajectory(GatewayBody):
    channel: ChannelName | None = None
    metadata: JsonFields = {}


ExceptionName = Annotated[str, Field(max_length=100, pattern=r"^[\w.]*$")]


class CompleteTrajectory(GatewayBody):
    reward: FiniteFloat | None = None
    channel: ChannelName | None = None
    failure: str = Field(default="", max_length=200)
    """How the policy failed, if it did: too_long, for example. Then the rollout counts in its group with its reward
    even if no call of it was recorded. It becomes `ended_by` in the metadata."""
    exception: ExceptionName = ""
    """The type of the exception that ended it, if one did; it is counted."""


class AbortTrajectory(GatewayBody):
    reason: str = ""
    """Why the rollout failed; it is logged."""
    exception: ExceptionName = ""
    """The type of the exception that ended it, if one did; it is counted."""


class TrajectoryEnded(GatewayBody):
    status: EndResult


StepIndex = Annotated[int, Field(ge=0, lt=2**31)]


class Feedback(GatewayBody):
    """One of `value`, `thumb` and `rating`."""

    value: FiniteFloat | None = None
    """The reward."""
    thumb: Literal["up", "down"] | None = None
    """The reward 1 or -1."""
    rating: FiniteFloat | None = None
    """A rating on the scale, from which it is mapped to a reward from -1 to 1."""
    scale: tuple[FiniteFloat, FiniteFloat] = (1.0, 5.0)
    """The worst and the best rating."""
    step_index: StepIndex | Literal["last"] | None = None
    """The step that gets the reward. Without one, the whole trajectory gets a `value`, and the last step a thumb or a
    rating."""
    source: str = Field(default="feedback", min_length=1, max_length=200)
    """The name of the one who gives the feedback."""
    note: str = Field(default="", max_length=10_000)
    """The reason as text; it is added to the trajectory's metadata."""

    @model_validator(mode="after")
    def _says_one_thing(self) -> "Feedback":
        if sum(given is not None for given in (self.value, self.thumb, self.rating)) != 1:
            raise ValueError("feedback has one of value, thumb and rating")
        low, high = self.scale
        if low >= high or (self.rating is not None and not low <= self.rating <= high):
            raise ValueError(f"a rating is on its scale, which goes up; here {self.rating} from {low:g} to {high:g}")
        return self

    @property
    def reward(self) -> float:
        if self.rating is not None:
            low, high = self.scale
            return 2.0 * (self.rating - low) / (high - low) - 1.0
        return self.value if self.value is not None else 1.0 if self.thumb == "up" else -1.0

    @property
    def rewarded_step(self) -> int | None:
        """The index of the rewarded step, or LAST_STEP; None for the whole trajectory."""
        if self.step_index == "last" or (self.step_index is None and self.value is None):
            return LAST_STEP
        return self.step_index


class FeedbackGiven(GatewayBody):
    status: Literal["counted", "late"]
    """counted: the reward is used for training or, if the trajectory was already handed out, kept in the archive. late:
    there is no archive. In both cases it is trained if the trajectory comes back from its trainer."""


class Registered(GatewayBody):
    status: Literal["ok"] = "ok"


Spans = list[tuple[Version, TokenCount, TokenCount]]
SUBMITTED_TYPES: dict[ColumnKind, Any] = {
    ColumnKind.IDS: list[TokenId],
    ColumnKind.FLOATS: list[Logprob] | None,
    ColumnKind.FLAGS: list[bool] | None,
    ColumnKind.INT32: Annotated[int, Field(ge=0, lt=2**31)],
    ColumnKind.INT64: Version,
    ColumnKind.FLOAT64: FiniteFloat | None,
    ColumnKind.FLAG: bool,
    ColumnKind.TEXT: str,
    ColumnKind.OPTIONAL_TEXT: str | None,
    ColumnKind.OBJECT: JsonFields,
    ColumnKind.SPANS: Annotated[
        Spans,
        Field(
            description="Version, first token, and the token after the last, of each run of tokens that "
            "one version wrote."
        ),
    ],
}
OTHER_NAMES = {"response_logprobs": ("rollout_log_probs",)}
"""Claw-R1's names of columns."""
BY_NAME = {column.name: column for column in STEP_COLUMNS}
SUBMITTED = tuple(BY_NAME[field.name] for field in fields(Step) if BY_NAME[field.name].submitted)


def _submitted_field(column: Column) -> Any:
    """The type and the default of a field. A submitter names its trajectory and group, and indexes its steps."""
    type_ = Uid if column.per in (ColumnScope.TRAJECTORY, ColumnScope.GROUP) else SUBMITTED_TYPES[column.kind]
    default = ... if column.default is REQUIRED or column.name == "step_index" else column.default
    default = [] if column.kind is ColumnKind.SPANS else default  # as its type says: flows send what they leave out
    names = (column.name, *OTHER_NAMES.get(column.name, ()))
    return type_, Field(default, validation_alias=AliasChoices(*names)) if len(names) > 1 else default


_SubmittedColumns: Any = create_model(
    "_SubmittedColumns", __base__=GatewayBody, **{column.name: _submitted_field(column) for column in SUBMITTED}
)


class SubmittedStep(_SubmittedColumns):  # type: ignore[misc]
    multi_modal_data: JsonFields = Field(default_factory=dict)
    """Images and the like. They are not stored, and a step that has some is not trained."""
    routed_experts: Any = None
    """Accepted and not stored."""

    def to_step(self) -> Step:
        values = {column.name: _step_value(column, getattr(self, column.name)) for column in SUBMITTED}
        return Step(**values, untrainable=MULTIMODAL if self.multi_modal_data else None)


def _step_value(column: Column, value: Any) -> Any:
    if column.kind is ColumnKind.SPANS:
        return tuple(VersionSpan(*span) for span in value)
    return READERS[column.kind](value) if column.kind in ARRAY_KINDS and value is not None else value


class SubmitSteps(GatewayBody):
    steps: Annotated[list[SubmittedStep], Field(max_length=MAX_SUBMITTED_STEPS)]


class StepsSubmitted(GatewayBody):
    accepted: int
    refused: dict[str, int]
    """The number of refused steps by cause: duplicate, late, mixed_indexes, too_large."""


class RefillWanted(GatewayBody):
    prompt_uid: str
    missing: int


class PacingNow(GatewayBody):
    may_start: int | None
    """New trajectories that may start without making others too stale; null if any number may: before the first
    training step, and without max_staleness."""
    waits_for: str = ""
    """Why no trajectory may start now."""
    in_flight: int
    queued: int
    refills: list[RefillWanted]
    """Groups whose deadline has passed, and how many more rollouts each needs."""
    group_deadline: float | None = None
    """Seconds that a group may take to complete."""
    missing: list[str] = []
    """Shards of the pool that did not answer. Their last known numbers are counted."""


class Generate(GatewayBody):
    prompt_ids: list[TokenId] = Field(min_length=1)
    sampling_params: JsonFields = {}
    image_data: list[Any] | None = Field(default=None, max_length=0)
    """Must be empty: an engine gets only the token ids."""
    video_data: list[Any] | None = Field(default=None, max_length=0)
    """Must be empty."""


class GenerationDone(GatewayBody):
    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str | None
    policy_version: int
    """The version of the oldest token."""
    version_spans: list[VersionSpan]
    model: str = ""
    """The name of the model or adapter that answered; empty if the engine does not report it."""
    temperature: float | None = None
    sampling: JsonFields = {}
    """The sampling parameters in force, for the step that the agent submits."""


class ComputeReward(GatewayBody):
    prompt_ids: list[TokenId]
    response_ids: list[TokenId]
    multi_modal_data: JsonFields = {}
    """Passed on to the reward function, as metadata."""
    num_turns: int = Field(default=1, ge=0)
    extra_fields: JsonFields = {}
    dataset_fields: JsonFields = {}


class RewardComputed(GatewayBody):
    reward_score: float
    reward_extra_info: JsonFields


class Readiness(GatewayBody):
    ready: bool
    missing: dict[str, str]
    """The reason for each part that is not ready."""


Address = Annotated[
    str,
    StringConstraints(pattern=r"^https?://[^\s/?#]+[^\s?#]*$", max_length=2000),
    _refused_with("use an address like http://host:8001, without ? and #, of at most 2000 characters"),
]


class ForgetSubject(GatewayBody):
    """One of `subject` and `older_than`."""

    subject: str | None = Field(default=None, min_length=1)
    """The user of a session, or what the metadata of a trajectory names as its subject."""
    older_than: FiniteFloat | None = Field(default=None, gt=0)
    """Seconds: everything whose first call began longer ago, and what is older than its own retention."""

    @model_validator(mode="after")
    def _names_one_thing(self) -> "ForgetSubject":
        if (self.subject is None) is (self.older_than is None):
            raise ValueError("say one of subject and older_than")
        return self


class ForgetReceipt(GatewayBody):
    subject: str
    """A keyed hash of the subject; `age` for what was too old."""
    older_than: float | None = None
    """Seconds, for what was too old."""
    asked_at: float
    """The time at which it was first asked for, in seconds since 1970."""
    written_at: float
    trained_versions: list[int]
    """The first version of the policy for each batch that had its data."""
    shards: dict[str, Any]
    """The counts of what each shard removed."""


class EngineAddress(GatewayBody):
    address: Address
    """http://host:port"""


class EngineNow(GatewayBody):
    address: str
    state: str
    """healthy, paused, unsynced or down."""
    why: str
    """The reason why the engine is unsynced or down; else empty."""
    in_flight: int
    weight_version: str | None
    server: str
    """The version that the server reports; empty for a plain OpenAI server."""


class EngineList(GatewayBody):
    engines: list[EngineNow]
