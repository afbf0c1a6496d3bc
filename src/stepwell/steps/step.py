"""The Step: one LLM call, token for token as the engine sampled it.

- `exactness` says where the ids come from: the engine, a white-box agent, or text that was encoded again.
- `reward` is None until someone scores the step, so that an error is never taken for 0.
- A step with `quarantine` is never trained. A step with `untrainable` is trained only if the consumer asks for it.
- The fields are those of `STEP_COLUMNS` in steps/step.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stepwell.common.message_format import message, sent

IntArray: TypeAlias = NDArray[np.int32]
FloatArray: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
JsonObject: TypeAlias = Mapping[str, Json]

OF_STEP = "step"
OF_TRAJECTORY = "trajectory"
CUT_SHORT = "cut_short"
"""The finish_reason of an answer that its agent did not read to its end, because its time was over, for example."""
BRIDGED, RENDERED = "bridged", "rendered"
INDEX_BY_POOL = -1
"""The step_index of a step that the pool indexes: every step of a black-box agent."""


@sent
class Exactness(StrEnum):
    """How certain it is that a step's ids are those that were sampled. The best grade comes first."""

    ENGINE = "engine"
    """The gateway recorded them from the engine's reply."""
    SUBMITTED = "submitted"
    """A white-box agent submitted them."""
    RETOKENIZED = "retokenized"
    """The engine returned only text, and the gateway encoded it."""

    def at_least(self, wanted: "Exactness") -> bool:
        return self is wanted or GRADES[self] <= GRADES[wanted]


GRADES = {grade: place for place, grade in enumerate(Exactness)}
"""The rank of each grade; 0 for the best."""


@sent
class VersionSpan(NamedTuple):
    """The policy `version` sampled the response tokens from `start` up to `end` (exclusive)."""

    version: int
    start: int
    end: int


@message
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Step:
    """A state (prompt), an action (response), and what is known about them."""

    prompt_ids: IntArray
    """The token ids of the whole context."""
    response_ids: IntArray
    """The token ids that the model wrote, with the stop token."""
    trajectory_uid: str
    """Shared by all steps of one conversation."""
    prompt_uid: str
    """Shared by all rollouts of one prompt. It names the group and selects the shard."""
    step_index: int = INDEX_BY_POOL
    """The place of the step in its trajectory."""
    reward: float | None = None
    """The step's own reward. The last trainable step shows its trajectory's outcome reward if it has none of its
    own."""
    reward_source: str = ""
    """Who gave the reward."""
    reward_revision: int = 0
    """How often a reward was given; 0 means never."""
    policy_version: int = 0
    """The version of the weights that wrote the oldest response token."""
    is_last: bool = False
    metadata: JsonObject = field(default_factory=dict)
    """Fields of the dataset, the data source and so on."""
    response_logprobs: FloatArray | None = None
    response_mask: BoolArray | None = None
    """Which response tokens are trained; None means all. With a mask, a multi-turn sequence can be one step."""
    version_spans: tuple[VersionSpan, ...] = ()
    """Which weights wrote which response tokens, if the engine reports it; empty means `policy_version` for all."""
    exactness: Exactness = Exactness.SUBMITTED
    finish_reason: str | None = None
    sampling: JsonObject = field(default_factory=dict)
    """The sampling parameters in force, and the engine's `logprobs_mode`: raw, processed or unknown. Without one, the
    log-probabilities are taken for those of the distribution in force."""
    extras: JsonObject = field(default_factory=dict)
    """Fields for the producer and the consumer. Stepwell does not read them."""
    model: str = ""
    """The name of the model or adapter that the engine reported; empty if it is not known."""
    uid: str = ""
    """Identifies the step in its trajectory: a step that is sent twice is kept once. If empty, step_index does."""
    started_at: float = 0.0
    """When the call began, in seconds of the wall clock. The pool indexes steps in this order."""
    quarantine: str | None = None
    """Why the step must not be trained; None if it is sound."""
    untrainable: str | None = None
    """Why a sound step is trained only if the consumer asks for it, as "kind: explanation"; None for other steps. The
    kinds are in steps/trainable.py."""
    temperature: float | None = None
    """The temperature at which the response was sampled; None if it is not known."""
    trajectory_return: float | None = None
    """The return of its trajectory: the outcome reward and the rewards of all steps, also of those that are left out of
    the batch. The pool fills it in when it hands the step out."""
    outcome_reward: float | None = None
    """The reward of its trajectory as a whole, apart from the steps' own. The pool fills it in."""
    reward_of: str = ""
    """The kind of `reward`: the step's own (OF_STEP), or the outcome reward (OF_TRAJECTORY). Empty without a reward,
    and in older files."""
    prompt_made: str = ""
    """How the prompt of a chat call was made: BRIDGED from the tokens of the step that it continues, or by the engine
    from the messages, as "rendered: reason". Empty if nobody tells."""
    lineage: JsonObject = field(default_factory=dict)
    """Digests of the conversation and its reply, by which a later call finds the step that it continues, and the
    setting `thinking` in force. Empty without a bridge."""

    @property
    def identity(self) -> str:
        return self.uid or f"#{self.step_index}"

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def ids_array(ids: ArrayLike) -> IntArray:
    return np.asarray(ids, dtype=np.int32)


def logprobs_array(logprobs: ArrayLike) -> FloatArray:
    return np.asarray(logprobs, dtype=np.float32)


def mask_array(mask: ArrayLike) -> BoolArray:
    return np.asarray(mask, dtype=np.bool_)
