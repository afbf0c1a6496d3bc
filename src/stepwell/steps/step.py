"""The Step: one LLM call, token for token as the engine sampled it; and the table of its columns, which every form in
which a step is stored or sent follows.

- `exactness` says where the ids come from: the engine, a white-box agent, or text that was encoded again.
- `reward` is None until someone scores the step, so that an error is never taken for 0.
- A step with `quarantine` is never trained. A step with `untrainable` is trained only if the consumer asks for it.
- `Step` lists the columns of `STEP_COLUMNS` by hand, for their types; a test compares the two. `Columns` has a typed
  attribute for each column that is computed with; all others are in its dictionary `carried`. Arrow, JSON lines, spool
  files, journal rows, the body of /submit_steps and the dashboard loop over the table.
- A column is never removed or moved. A new one comes last among the step columns, with a default for older files.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, StrEnum, auto
from typing import Any, NamedTuple, TypeAlias

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


# -- the table of columns ----------------------------------------------------------------------------------------------


class ColumnKind(Enum):
    """The type of a value. JSON has arrays as lists and an unknown number as null."""

    IDS = auto()
    FLOATS = auto()
    FLAGS = auto()
    INT32 = auto()
    INT64 = auto()
    FLOAT64 = auto()
    """NaN in arrays means unknown: None in a step."""
    FLAG = auto()
    TEXT = auto()
    OPTIONAL_TEXT = auto()
    GRADE = auto()
    """An Exactness."""
    OBJECT = auto()
    """JSON. Tables and lines have it as text, because its keys differ from step to step."""
    SPANS = auto()
    """A tuple of VersionSpan."""

    __hash__ = object.__hash__  # that of Enum is slow, and every message looks kinds up


class ColumnScope(Enum):
    """The owner of one value of the column."""

    PROMPT_TOKEN = auto()
    RESPONSE_TOKEN = auto()
    STEP = auto()
    TRAJECTORY = auto()
    GROUP = auto()


class Storage(Enum):
    """Where a pool keeps the column of a step."""

    TREE = auto()
    """The prefix tree of the step's trajectory."""
    OWN = auto()
    """An attribute of StoredStep of the same name, which rules read."""
    CARRIED = auto()
    """StoredStep.carried, which no rule reads. No rule reads it."""
    RECORD = auto()
    """The record of the step's trajectory or group."""
    DERIVED = auto()
    """Nowhere: it is computed when the step is shipped."""


REQUIRED: object = object()
"""The default of a column that has none."""


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    """The name of the field of Step, of the Arrow column and of the JSON key."""
    kind: ColumnKind
    _: KW_ONLY
    per: ColumnScope = ColumnScope.STEP
    default: object = REQUIRED
    """The value where a file or a sender does not have the column."""
    stored: Storage = Storage.OWN
    packed: str = ""
    """The name in Columns and in spool files; `name` if it is not given."""
    submitted: bool = False
    """Does /submit_steps accept it?"""
    shown: bool = False
    """Does the dashboard show it with each step?"""
    since: int = 1
    """The version of the Arrow and JSON-lines schema that brought it."""

    def __post_init__(self) -> None:
        if not self.packed:
            object.__setattr__(self, "packed", self.name)


K, P, S = ColumnKind, ColumnScope, Storage
STEP_COLUMNS = (
    Column("prompt_uid", K.TEXT, per=P.GROUP, stored=S.RECORD, packed="prompt_uids", submitted=True),
    Column("trajectory_uid", K.TEXT, per=P.TRAJECTORY, stored=S.RECORD, packed="trajectory_uids", submitted=True),
    Column("uid", K.TEXT, default="", packed="uids", shown=True),
    Column("step_index", K.INT32, default=INDEX_BY_POOL, packed="step_indexes_S", submitted=True, shown=True),
    Column("policy_version", K.INT64, default=0, packed="policy_versions_S", submitted=True, shown=True),
    Column("is_last", K.FLAG, default=False, stored=S.DERIVED, packed="is_last_S", submitted=True),
    Column("reward", K.FLOAT64, default=None, packed="rewards_S", submitted=True, shown=True),
    Column("reward_source", K.TEXT, default="", packed="reward_sources", shown=True),
    Column("reward_revision", K.INT32, default=0, packed="reward_revisions_S", shown=True),
    Column("prompt_ids", K.IDS, per=P.PROMPT_TOKEN, stored=S.TREE, packed="tokens", submitted=True),
    Column("response_ids", K.IDS, per=P.RESPONSE_TOKEN, stored=S.TREE, packed="tokens", submitted=True),
    Column("response_logprobs", K.FLOATS, per=P.RESPONSE_TOKEN, default=None, packed="logprobs", submitted=True),
    Column("response_mask", K.FLAGS, per=P.RESPONSE_TOKEN, default=None, packed="mask", submitted=True),
    Column("version_spans", K.SPANS, default=(), submitted=True, shown=True),
    Column("exactness", K.GRADE, default=Exactness.SUBMITTED, shown=True),
    Column(
        "finish_reason",
        K.OPTIONAL_TEXT,
        default=None,
        stored=S.CARRIED,
        packed="finish_reasons",
        submitted=True,
        shown=True,
    ),
    Column("started_at", K.FLOAT64, default=0.0, packed="started_at_S", shown=True),
    Column("quarantine", K.OPTIONAL_TEXT, default=None, shown=True),
    Column("untrainable", K.OPTIONAL_TEXT, default=None, shown=True, since=2),
    Column("metadata", K.OBJECT, default={}, submitted=True),
    Column("sampling", K.OBJECT, default={}, stored=S.CARRIED, submitted=True, shown=True),
    Column("extras", K.OBJECT, default={}, stored=S.CARRIED, submitted=True),
    Column("model", K.TEXT, default="", packed="models", submitted=True, shown=True, since=4),
    Column(
        "temperature",
        K.FLOAT64,
        default=None,
        stored=S.CARRIED,
        packed="temperatures_S",
        submitted=True,
        shown=True,
        since=5,
    ),
    Column(
        "trajectory_return", K.FLOAT64, per=P.TRAJECTORY, default=None, stored=S.DERIVED, packed="returns_S", since=5
    ),
    Column("outcome_reward", K.FLOAT64, per=P.TRAJECTORY, default=None, stored=S.DERIVED, packed="outcomes_S", since=5),
    Column("reward_of", K.TEXT, default="", stored=S.DERIVED, packed="rewards_of", since=5),
    Column("prompt_made", K.TEXT, default="", stored=S.CARRIED, packed="prompts_made", shown=True, since=6),
    Column("lineage", K.OBJECT, default={}, stored=S.CARRIED, packed="lineages", since=6),
)
GROUP_COLUMNS = (
    Column("group", K.INT32, per=P.GROUP, stored=S.RECORD),
    Column("opened_at", K.FLOAT64, per=P.GROUP, default=0.0, stored=S.RECORD),
    Column("attempts", K.INT32, per=P.GROUP, default=0, stored=S.RECORD),
    Column("from_history", K.FLAG, per=P.GROUP, default=False, stored=S.DERIVED),
    Column("source", K.TEXT, per=P.GROUP, default="", stored=S.RECORD, since=3),
    Column("left_out", K.OBJECT, per=P.GROUP, default={}, stored=S.DERIVED, since=5),
    Column("channel", K.TEXT, per=P.GROUP, default="", stored=S.RECORD),
)

SCHEMA = max(column.since for column in STEP_COLUMNS + GROUP_COLUMNS)
"""The version of Arrow tables and JSON lines that this code writes. It reads this one and all before."""
ARRAY_KINDS = (K.IDS, K.FLOATS, K.FLAGS)
SCALAR_COLUMNS = tuple(column for column in STEP_COLUMNS if column.kind not in ARRAY_KINDS)
"""The columns with one value for each step."""
READERS: dict[ColumnKind, Callable[[Any], Any]] = {
    K.IDS: ids_array,
    K.FLOATS: logprobs_array,
    K.FLAGS: mask_array,
    K.GRADE: Exactness,
    K.OBJECT: json.loads,
    K.SPANS: lambda spans: tuple(VersionSpan(**span) for span in spans),
}
"""How a value is read from a table or a line; values of other kinds are there as they are."""
CARRIED = tuple(column for column in STEP_COLUMNS if column.stored is S.CARRIED)
SHOWN = tuple(column.name for column in STEP_COLUMNS if column.shown)
