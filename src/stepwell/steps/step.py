"""The Step: one LLM call, token for token as the engine sampled it.

What always holds: `exactness` says whether ids are the engine's own, a white-box agent's, or a re-encoding of text;
`reward` is None until someone scores, so that an error is never mistaken for 0; a step with `quarantine` set is never
trained, one with `untrainable` set only by a consumer that asks for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray: TypeAlias = NDArray[np.int32]
FloatArray: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
JsonObject: TypeAlias = Mapping[str, Json]

INDEX_BY_POOL = -1
"""The step_index of a step whose place in its trajectory the pool decides (every black-box call)."""


class Exactness(StrEnum):
    """How far a step's ids can be trusted to be those that were sampled: a grade, the best one first."""

    ENGINE = "engine"
    """Recorded by the gateway from the engine's own answer."""
    SUBMITTED = "submitted"
    """Handed in by a white-box agent, which vouches for it."""
    RETOKENIZED = "retokenized"
    """The engine gave text only, and the gateway encoded it again."""

    def at_least(self, wanted: "Exactness") -> bool:
        return self is wanted or GRADES[self] <= GRADES[wanted]


GRADES = {grade: place for place, grade in enumerate(Exactness)}
"""0 for the best grade."""


class VersionSpan(NamedTuple):
    """Response tokens `start` to `end` (exclusive) were sampled under policy `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Step:
    """The atom of RL data: a state (prompt), an action (response), and what is known of them."""

    prompt_ids: IntArray
    """The whole context, as token ids."""
    response_ids: IntArray
    """What the model wrote, the stop token included."""
    trajectory_uid: str
    """Shared by all steps of one conversation."""
    prompt_uid: str
    """Shared by all rollouts of one prompt: the group, and the key by which a shard is found."""
    step_index: int = INDEX_BY_POOL
    """Place within the trajectory."""
    reward: float | None = None
    reward_source: str = ""
    """Who gave the reward."""
    reward_revision: int = 0
    """How often it was given; 0 means never."""
    policy_version: int = 0
    """The version of the weights that wrote the oldest response token."""
    is_last: bool = False
    metadata: JsonObject = field(default_factory=dict)
    """Dataset fields, data source and the like."""
    response_logprobs: FloatArray | None = None
    response_mask: BoolArray | None = None
    """Which response tokens are trained; None means all. Lets a multi-turn sequence be one step."""
    version_spans: tuple[VersionSpan, ...] = ()
    """Which weights wrote which response tokens, where the engine says so; empty means `policy_version` for all."""
    exactness: Exactness = Exactness.SUBMITTED
    finish_reason: str | None = None
    sampling: JsonObject = field(default_factory=dict)
    """The sampling parameters sent to the engine."""
    extras: JsonObject = field(default_factory=dict)
    """Fields that only the producer and the consumer understand; they round-trip."""
    model: str = ""
    """The name of the model or adapter that the engine reported; empty if it is not known."""
    uid: str = ""
    """Identity within the trajectory: a step sent twice is kept once. Empty means: identified by its step_index."""
    started_at: float = 0.0
    """Wall-clock seconds at which the call began. Orders the steps whose index the pool decides."""
    quarantine: str | None = None
    """Why this step must not be trained; None for a sound one."""
    untrainable: str | None = None
    """Why this sound step is kept but not trained unless the consumer asks for it, written "kind: words" (the kinds:
    greedy, penalties, constrained, side_call); None for an ordinary one."""

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
