"""A bad update on purpose: other weights than the trainer's are offered to the engines, until a canary has them.

They are the trainer's own, trained towards wrong answers for some steps: fluent, and no fault shows in a checksum or a
log-probability. Only the users can tell.
"""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from stepwell.demo.live_service import SimulatedUser, conversation
from stepwell.demo.model import ScriptTurn, warm_up
from stepwell.pool.api.policy import PolicyDecision
from stepwell.trainers.trainer import Sync, Synced

if TYPE_CHECKING:
    import torch

STEPS, EXAMPLES = 50, 24


class PoisonedSync:
    """A Sync that spoils the weights of one canary, the first after version `after`.

    The guard skips versions that come while it tests another one, so every version is spoiled until one of them has
    become a canary.
    """

    def __init__(
        self,
        sync: Sync,
        decisions: Callable[[], Sequence[PolicyDecision]],
        *,
        after: int,
        spoil: "Callable[[torch.nn.Module], torch.nn.Module]",
    ) -> None:
        self._sync = sync
        self._decisions = decisions
        self._after = after
        self._spoil = spoil
        self._spoiled_versions: set[int] = set()
        self._spoiled_model: torch.nn.Module | None = None

    def sync(self, weights: "torch.nn.Module", version: int) -> Synced:
        if version <= self._after or self.poisoned is not None:
            return self._sync.sync(weights, version)
        if self._spoiled_model is None:
            self._spoiled_model = self._spoil(weights)
        self._spoiled_versions.add(version)
        return self._sync.sync(self._spoiled_model, version)

    @property
    def poisoned(self) -> int | None:
        """The spoiled version that users got; None if none has become a canary yet."""
        decided = (d.version for d in self._decisions() if d.action in ("canary", "promote"))
        return next((version for version in decided if version in self._spoiled_versions), None)


def spoiled(model: "torch.nn.Module") -> "torch.nn.Module":
    """A copy that was trained to swap the first two letters of a word."""
    worse = copy.deepcopy(model)
    warm_up(worse, _wrong_conversations(), STEPS, EXAMPLES)
    return worse


def _wrong_conversations() -> Iterator[Sequence[ScriptTurn]]:
    rng = random.Random(0)
    while True:
        yield tuple(conversation(SimulatedUser(rng), lambda word: word[1] + word[0] + word[2:]))
