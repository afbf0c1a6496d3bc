"""The steps of a trajectory at rest, in one piece of memory.

A small step is a dozen Python objects that take several times the bytes of its tokens. A pool that holds millions of
complete rollouts keeps them packed, and takes them apart when somebody asks for them.

- `unpack(pack(steps, tree))` gives equal steps, in their order, and an equal tree.
- Values that most steps have alike are kept once for all trajectories, as long as there are few different ones. They
  stay for good, so they never have what a person or a producer wrote.
- The bytes stay in the process that made them: they are no format.
"""

import pickle
from collections import deque
from operator import attrgetter
from typing import Any

import numpy as np

from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.prefix_tree import PrefixTree
from stepwell.steps.step import CARRIED, VersionSpan

ALIKE = (
    *("policy_version", "metadata", "exactness", "carried", "quarantine", "untrainable", "model", "lease", "shipped"),
    "step_index",
)
"""Fields of StoredStep that most steps have alike."""
OWN = (
    *("identity", "number", "prompt_length", "response_length", "started_at", "branch", "nbytes"),
    *("reward", "reward_source", "reward_revision"),
)
PERSONAL = tuple([column.name for column in CARRIED].index(name) for name in ("extras", "lineage"))
"""Places in StoredStep.carried."""
values_alike, own_values = attrgetter(*ALIKE), attrgetter(*OWN)
MOST_KINDS = 256
"""Of values that are kept once."""


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
    return bool(step.metadata or step.quarantine or any(step.carried[place] for place in PERSONAL))
