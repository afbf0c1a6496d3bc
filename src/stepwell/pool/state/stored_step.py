"""Steps as the pool stores them: the tokens in their trajectory's prefix tree, the rest in one small record each.

The steps of a trajectory at rest are in one piece of memory. A small step is a dozen Python objects that take several
times the bytes of its tokens; a pool that holds millions of complete rollouts takes them apart when somebody asks.

- `unpack(pack(steps, tree))` gives equal steps, in their order, and an equal tree.
- Values that most steps have alike are kept once for all trajectories, as long as there are few different ones. They
  stay for good, so they never have what a person or a producer wrote.
- The packed bytes stay in the process that made them: they are no format.
"""

import pickle
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import add, attrgetter
from typing import Any

import numpy as np

from stepwell.steps.columns import Columns, pack, unpack, unpack_values
from stepwell.steps.prefix_tree import PrefixTree
from stepwell.steps.step import (
    CARRIED,
    BoolArray,
    ColumnKind,
    Exactness,
    FloatArray,
    IntArray,
    JsonObject,
    Step,
    VersionSpan,
)

NO_PLACE = -1
FINISH_REASON, LINEAGE, EXTRAS = map([column.name for column in CARRIED].index, ("finish_reason", "lineage", "extras"))
"""Places in StoredStep.carried."""
NO_FIELDS: JsonObject = {}


@dataclass(slots=True, eq=False)
class StoredStep:
    number: int
    """Order of arrival in the pool, unique."""
    identity: str
    uid: str
    step_index: int
    prompt_length: int
    response_length: int
    logprobs: FloatArray | None
    mask: BoolArray | None
    policy_version: int
    version_spans: tuple[VersionSpan, ...]
    reward: float | None
    reward_source: str
    reward_revision: int
    metadata: JsonObject
    exactness: Exactness
    carried: tuple[Any, ...]
    """The columns that no rule reads, in the order of the schema."""
    started_at: float
    quarantine: str | None
    untrainable: str | None = None
    model: str = ""
    branch: int = NO_PLACE
    nbytes: int = 0
    """The bytes that it added to what is stored."""
    lease: str | None = None
    """The lease under which a consumer of single steps has it."""
    shipped: bool = False
    """A consumer of single steps has acknowledged it. Only its identity is still needed."""

    @property
    def finish_reason(self) -> str | None:
        reason: str | None = self.carried[FINISH_REASON]
        return reason

    @property
    def lineage(self) -> Mapping[str, Any]:
        lineage: Mapping[str, Any] = self.carried[LINEAGE]
        return lineage

    @property
    def extras(self) -> Mapping[str, Any]:
        extras: Mapping[str, Any] = self.carried[EXTRAS]
        return extras

    @property
    def tokens(self) -> int:
        return self.prompt_length + self.response_length

    @property
    def oldest_version(self) -> int:
        spans = self.version_spans
        return min(span.version for span in spans) if spans else self.policy_version

    @property
    def newest_version(self) -> int:
        spans = self.version_spans
        return max(span.version for span in spans) if spans else self.policy_version

    def is_held(self) -> bool:
        """Neither quarantined nor shipped."""
        return self.quarantine is None and not self.shipped


class PackedSteps:
    """Packed steps as they arrive. Each column is converted to plain values once, not once per step."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self._tokens = columns.tokens
        self._prompts: list[int] = columns.prompt_lengths_S.tolist()
        self._responses: list[int] = columns.response_lengths_S.tolist()
        self._token_at = list(accumulate(map(add, self._prompts, self._responses)))
        self._response_at = list(accumulate(self._responses))
        self.indexes: list[int] = columns.step_indexes_S.tolist()
        self.identities = [uid or f"#{index}" for uid, index in zip(columns.uids, self.indexes, strict=True)]
        self.started_at: list[float] = columns.started_at_S.tolist()
        sent_at = columns.sent_at
        self.ages = [None if sent_at is None else sent_at - started_at for started_at in self.started_at]
        """Seconds from the beginning of each call until its step was sent; None if the sender does not tell."""
        self.is_last = columns.is_last_S.tolist()
        carried = [read(columns.carried[name]) for name, read in READ_CARRIED]
        self._before_arrays = list(
            zip(self.identities, columns.uids, self.indexes, self._prompts, self._responses, strict=True)
        )
        """The fields of each StoredStep between its number and its arrays, in their order, then those behind: to name
        every field of every step takes three times as long."""
        self._behind_arrays = list(
            zip(
                columns.policy_versions_S.tolist(),
                columns.version_spans,
                [None if reward != reward else reward for reward in columns.rewards_S.tolist()],
                columns.reward_sources,
                columns.reward_revisions_S.tolist(),
                columns.metadata,
                columns.exactness,
                zip(*carried, strict=True),
                self.started_at,
                columns.quarantine,
                columns.untrainable,
                columns.models,
                strict=True,
            )
        )
        self._all_trained = bool(columns.mask.all())
        self._unpacked: list[Step] | None = None

    def __len__(self) -> int:
        return len(self.columns)

    def tokens(self, i: int) -> IntArray:
        """A view into the message."""
        end = self._token_at[i]
        return self._tokens[end - self._prompts[i] - self._responses[i] : end]

    def nbytes(self, i: int) -> int:
        """The most bytes of data that it can add."""
        return 4 * self._prompts[i] + 9 * self._responses[i]

    def copy_step(self, i: int) -> Step:
        """A whole step with arrays of its own. The message is unpacked once, for all its steps."""
        if self._unpacked is None:
            self._unpacked = unpack(self.columns, copy=False)
        return unpack(pack([self._unpacked[i]]), copy=True)[0]

    def stored(self, i: int, number: int) -> StoredStep:
        """The step without its tokens. Its other arrays are copies, so that the message can be freed."""
        columns = self.columns
        response = slice(self._response_at[i] - self._responses[i], self._response_at[i])
        given = columns.logprobs[response]
        logprobs = None if len(given) == 0 or given[0] != given[0] else given.copy()
        mask = None if self._all_trained or columns.mask[response].all() else columns.mask[response].copy()
        return StoredStep(number, *self._before_arrays[i], logprobs, mask, *self._behind_arrays[i])


def _share_objects(values: list[Any]) -> list[Any]:
    """Here and below: values that most steps have alike are one object, because a pool holds millions of steps."""
    return [value or NO_FIELDS for value in values]


def _share_texts(values: list[Any]) -> list[Any]:
    return [value and sys.intern(value) for value in values]


READERS: dict[ColumnKind, Callable[[Any], list[Any]]] = {
    ColumnKind.OBJECT: _share_objects,
    ColumnKind.TEXT: _share_texts,
    ColumnKind.OPTIONAL_TEXT: _share_texts,
}
READ_CARRIED: list[tuple[str, Callable[[Any], list[Any]]]] = [
    (column.packed, READERS.get(column.kind) or partial(unpack_values, column)) for column in CARRIED
]
"""How each column is read, chosen once and not for every message."""
ALIKE = (
    *("policy_version", "metadata", "exactness", "carried", "quarantine", "untrainable", "model", "lease", "shipped"),
    "step_index",
)
"""Fields of StoredStep that most steps have alike."""
OWN = (
    *("identity", "number", "prompt_length", "response_length", "started_at", "branch", "nbytes"),
    *("reward", "reward_source", "reward_revision"),
)
values_alike, own_values = attrgetter(*ALIKE), attrgetter(*OWN)
MOST_KINDS = 256
"""The most different sets of ALIKE values that are stored once for many steps."""


class TrajectoryPacker:
    def __init__(self) -> None:
        self.awake: deque[str] = deque()
        """The uids of trajectories that may be packed, the last used one at the end. A uid may be there twice."""
        self._kinds: list[dict[str, Any]] = []
        """Values that steps have alike."""
        self._kind_of: dict[bytes, int] = {}

    def pack(self, steps: dict[str, StoredStep], tree: PrefixTree) -> bytes:
        return pickle.dumps(([self._pack(step) for step in steps.values()], tree.dump()), protocol=5)

    def unpack(self, packed: bytes) -> tuple[dict[str, StoredStep], PrefixTree]:
        rows, tree = pickle.loads(packed)
        return {row[0]: self._unpack(*row) for row in rows}, PrefixTree.load(tree)

    def _pack(self, step: StoredStep) -> tuple[Any, ...]:
        alike = values_alike(step)
        dumped = pickle.dumps(alike, protocol=5)
        kind = self._kind_of.get(dumped)
        if kind is None and len(self._kinds) < MOST_KINDS and not _is_personal(step):
            kind = self._kind_of[dumped] = len(self._kinds)
            self._kinds.append(dict(zip(ALIKE, alike, strict=True)))
        arrays = (
            step.logprobs if step.logprobs is None else step.logprobs.tobytes(),
            step.mask if step.mask is None else step.mask.tobytes(),
        )
        uid = None if step.uid == step.identity else step.uid
        spans = tuple(map(tuple, step.version_spans))
        return *own_values(step), *arrays, uid, spans, dumped if kind is None else kind

    def _unpack(self, *row: Any) -> StoredStep:
        *own, logprobs, mask, uid, spans, kind = row
        alike = self._kinds[kind] if isinstance(kind, int) else dict(zip(ALIKE, pickle.loads(kind), strict=True))
        return StoredStep(
            **dict(zip(OWN, own, strict=True)),
            **alike,
            uid=own[0] if uid is None else uid,
            logprobs=None if logprobs is None else np.frombuffer(logprobs, np.float32),
            mask=None if mask is None else np.frombuffer(mask, np.bool_),
            version_spans=tuple(VersionSpan(*span) for span in spans),
        )


def _is_personal(step: StoredStep) -> bool:
    """May it have more of its own than numbers and settings?"""
    return bool(step.metadata or step.quarantine or step.extras or step.lineage)
