"""The weights of the stable version, the candidate and the newest version, each ready to be put into engines.

- Each has a WeightSync of its own, which keeps the prepared files. So an engine changes from one version to another
  without the trainer's model, in the time that it takes to load them.
- Which engines belong to a version is asked anew each time.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from stepwell.trainers.weight_sync import SyncReport, VersionedPool, WeightSync

if TYPE_CHECKING:
    import torch

SLOTS = 3

MakeSync: TypeAlias = Callable[[VersionedPool, Path], WeightSync]
"""Makes a WeightSync for the engines of a list, which may use the folder. It has `background=False`."""


class StagedVersions:
    def __init__(self, make_sync: MakeSync, folder: Path, engines_of: Callable[[int], Sequence[str]]) -> None:
        lists = [SlotEngines(engines_of) for _ in range(SLOTS)]
        self._slots = [Slot(engines, make_sync(engines, folder / f"slot-{n}")) for n, engines in enumerate(lists)]

    def __contains__(self, version: int | None) -> bool:
        return any(slot.engines.version == version for slot in self._slots)

    def stage(self, model: "torch.nn.Module", version: int, needed: Collection[int | None]) -> None:
        """Stages a version in the place of one that is not needed."""
        slot = self._free_slot(needed)
        slot.sync.stage(model, version)
        slot.engines.version = version

    def sync(self, model: "torch.nn.Module", version: int, needed: Collection[int | None]) -> SyncReport:
        """Stages the weights and brings them to the engines, as WeightSync.sync does."""
        slot = self._free_slot(needed)
        slot.engines.version = version
        return slot.sync.sync(model, version)

    def catch_up(self, version: int) -> list[str]:
        """Brings the weights of this version to those of its engines that do not have it; see WeightSync.catch_up."""
        return self._slot(version).sync.catch_up()

    def told_versions(self, version: int) -> dict[str, str | None]:
        """The version that each engine of this version reports; None if it does not answer."""
        return self._slot(version).sync.versions()

    def _slot(self, version: int) -> "Slot":
        return next(slot for slot in self._slots if slot.engines.version == version)

    def _free_slot(self, needed: Collection[int | None]) -> "Slot":
        free = next(slot for slot in self._slots if slot.engines.version not in needed or slot.engines.version is None)
        free.engines.version = None
        return free


class SlotEngines:
    """The engines of one version, as a WeightSync asks for them."""

    def __init__(self, engines_of: Callable[[int], Sequence[str]]) -> None:
        self.version: int | None = None
        self._engines_of = engines_of

    def engines(self) -> Sequence[str]:
        return () if self.version is None else self._engines_of(self.version)

    def set_policy_version(self, version: int, *, check: bool = True) -> None:
        """The guard tells the pool, with its reason."""

    def announce_sync(self) -> None:
        """The guard announces itself."""


@dataclass(frozen=True, slots=True)
class Slot:
    engines: SlotEngines
    sync: WeightSync
