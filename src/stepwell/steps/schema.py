"""The table of a step's columns. Every form in which a step is stored or sent follows it.

- `Step` lists the step columns by hand, for its types; a test compares it with the table.
- `Columns` has a typed attribute for each column that is computed with; all others are in its dictionary `carried`.
- Arrow, JSON lines, spool files, journal rows, the body of /submit_steps and the dashboard loop over the table.
- A column is never removed or moved. A new one comes last among the step columns, with a default for older files.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from stepwell.steps.step import INDEX_BY_POOL, Exactness, VersionSpan, ids_array, logprobs_array, mask_array


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    """The name of the field of Step, of the Arrow column and of the JSON key."""
    kind: ColumnKind
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
    Column(name="prompt_uid", kind=K.TEXT, per=P.GROUP, stored=S.RECORD, packed="prompt_uids", submitted=True),
    Column(
        name="trajectory_uid", kind=K.TEXT, per=P.TRAJECTORY, stored=S.RECORD, packed="trajectory_uids", submitted=True
    ),
    Column(name="uid", kind=K.TEXT, default="", packed="uids", shown=True),
    Column(name="step_index", kind=K.INT32, default=INDEX_BY_POOL, packed="step_indexes_S", submitted=True, shown=True),
    Column(name="policy_version", kind=K.INT64, default=0, packed="policy_versions_S", submitted=True, shown=True),
    Column(name="is_last", kind=K.FLAG, default=False, stored=S.DERIVED, packed="is_last_S", submitted=True),
    Column(name="reward", kind=K.FLOAT64, default=None, packed="rewards_S", submitted=True, shown=True),
    Column(name="reward_source", kind=K.TEXT, default="", packed="reward_sources", shown=True),
    Column(name="reward_revision", kind=K.INT32, default=0, packed="reward_revisions_S", shown=True),
    Column(name="prompt_ids", kind=K.IDS, per=P.PROMPT_TOKEN, stored=S.TREE, packed="tokens", submitted=True),
    Column(name="response_ids", kind=K.IDS, per=P.RESPONSE_TOKEN, stored=S.TREE, packed="tokens", submitted=True),
    Column(
        name="response_logprobs",
        kind=K.FLOATS,
        per=P.RESPONSE_TOKEN,
        default=None,
        packed="logprobs",
        submitted=True,
    ),
    Column(name="response_mask", kind=K.FLAGS, per=P.RESPONSE_TOKEN, default=None, packed="mask", submitted=True),
    Column(name="version_spans", kind=K.SPANS, default=(), submitted=True, shown=True),
    Column(name="exactness", kind=K.GRADE, default=Exactness.SUBMITTED, shown=True),
    Column(
        name="finish_reason",
        kind=K.OPTIONAL_TEXT,
        default=None,
        stored=S.CARRIED,
        packed="finish_reasons",
        submitted=True,
        shown=True,
    ),
    Column(name="started_at", kind=K.FLOAT64, default=0.0, packed="started_at_S", shown=True),
    Column(name="quarantine", kind=K.OPTIONAL_TEXT, default=None, shown=True),
    Column(name="untrainable", kind=K.OPTIONAL_TEXT, default=None, shown=True, since=2),
    Column(name="metadata", kind=K.OBJECT, default={}, submitted=True),
    Column(name="sampling", kind=K.OBJECT, default={}, stored=S.CARRIED, submitted=True, shown=True),
    Column(name="extras", kind=K.OBJECT, default={}, stored=S.CARRIED, submitted=True),
    Column(
        name="model",
        kind=K.TEXT,
        default="",
        packed="models",
        submitted=True,
        shown=True,
        since=4,
    ),
    Column(
        name="temperature",
        kind=K.FLOAT64,
        default=None,
        stored=S.CARRIED,
        packed="temperatures_S",
        submitted=True,
        shown=True,
        since=5,
    ),
    Column(
        name="trajectory_return",
        kind=K.FLOAT64,
        per=P.TRAJECTORY,
        default=None,
        stored=S.DERIVED,
        packed="returns_S",
        since=5,
    ),
    Column(
        name="outcome_reward",
        kind=K.FLOAT64,
        per=P.TRAJECTORY,
        default=None,
        stored=S.DERIVED,
        packed="outcomes_S",
        since=5,
    ),
    Column(name="reward_of", kind=K.TEXT, default="", stored=S.DERIVED, packed="rewards_of", since=5),
    Column(
        name="prompt_made",
        kind=K.TEXT,
        default="",
        stored=S.CARRIED,
        packed="prompts_made",
        shown=True,
        since=6,
    ),
    Column(name="lineage", kind=K.OBJECT, default={}, stored=S.CARRIED, packed="lineages", since=6),
)
GROUP_COLUMNS = (
    Column(name="group", kind=K.INT32, per=P.GROUP, stored=S.RECORD),
    Column(name="opened_at", kind=K.FLOAT64, per=P.GROUP, default=0.0, stored=S.RECORD),
    Column(name="attempts", kind=K.INT32, per=P.GROUP, default=0, stored=S.RECORD),
    Column(name="from_history", kind=K.FLAG, per=P.GROUP, default=False, stored=S.DERIVED),
    Column(name="source", kind=K.TEXT, per=P.GROUP, default="", stored=S.RECORD, since=3),
    Column(name="left_out", kind=K.OBJECT, per=P.GROUP, default={}, stored=S.DERIVED, since=5),
    Column(name="channel", kind=K.TEXT, per=P.GROUP, default="", stored=S.RECORD),
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
