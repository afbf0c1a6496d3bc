"""The state of a training run: on disk (Checkpoint), and what was trained since (TrainedLedger).

Invariants:
- The checkpoint file is whole or absent, at whatever moment the process dies.
- The trajectories that a checkpoint names are in its weights, and no others are.
- A lease stays in the ledger until a checkpoint with its rollouts is on disk; then it is acknowledged.
- A lease that expired before comes back with the same rollouts; the ledger knows their names, so they are not trained
  again. Where single steps are trained, it has the names of steps.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from stepwell.common.atomic_files import SUFFIX, replacing_file
from stepwell.errors import BadRequest, LeaseExpired, PoolUnavailable
from stepwell.pool.client import DataPool

if TYPE_CHECKING:
    import torch

log = logging.getLogger("stepwell.trainers")

FILE = "trainer.pt"
REMEMBERED = 10_000
"""Acknowledged rollouts whose names are kept: a pool that restarts may have missed an acknowledgement."""
TensorState: TypeAlias = dict[str, Any]
"""torch's state_dict."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Checkpoint:
    model: TensorState
    optimizer: TensorState
    random: "dict[str, torch.Tensor]"
    """The state of torch's random number generators, by device."""
    update: int
    version: int
    leases: list[tuple[str, str]]
    """Trained, and not acknowledged when this was written."""
    trajectories: list[str]
    """The last trained ones, the oldest first: those of the leases above, and many before them."""
    statistics: dict[str, list[float]] = field(default_factory=dict)
    """Of the rewards of earlier batches: RunningStatistics. An older checkpoint has none."""


class TrainedLedger:
    """The open leases, and the names of the trajectories trained last."""

    def __init__(self, open_leases: Iterable[tuple[str, str]] = (), trained: Iterable[str] = ()) -> None:
        self._leases = [(str(shard), str(lease)) for shard, lease in open_leases]
        self._trained = OrderedDict.fromkeys(trained)

    def __contains__(self, trajectory_uid: object) -> bool:
        return trajectory_uid in self._trained

    @property
    def leases(self) -> tuple[tuple[str, str], ...]:
        """Trained, and not acknowledged yet."""
        return tuple(self._leases)

    @property
    def trained(self) -> list[str]:
        """The oldest first."""
        return list(self._trained)

    def add(self, leases: Iterable[tuple[str, str]], trained: Sequence[str]) -> None:
        self._leases += leases
        self._trained.update(OrderedDict.fromkeys(trained))

    def acknowledge(self, pool: DataPool) -> None:
        """Acknowledge the open leases. Those of a pool that is away stay open: the next call tries them again."""
        try:
            pool.ack(self)
        except PoolUnavailable as away:
            log.warning("%d leases will be acknowledged later: %s", len(self._leases), away)
            return
        except LeaseExpired:
            log.warning("a lease expired before its batch was acknowledged; it comes back and is skipped")
        self._leases = []
        while len(self._trained) > REMEMBERED:
            self._trained.popitem(last=False)


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    values = {of.name: getattr(checkpoint, of.name) for of in fields(Checkpoint)}
    for unfinished in folder.glob(f"{FILE}.*{SUFFIX}"):  # of a trainer that was killed while it wrote
        unfinished.unlink()
    with replacing_file(folder / FILE) as file:
        torch.save(values, file)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """None if there is none yet."""
    import torch

    path = folder / FILE
    if not path.exists():
        return None
    values = torch.load(path, map_location="cpu", weights_only=True)
    known = {of.name for of in fields(Checkpoint)}
    needed = {of.name for of in fields(Checkpoint) if of.default_factory is MISSING}
    if not isinstance(values, dict) or not needed <= values.keys() <= known:
        raise BadRequest(f"{path} is not a checkpoint of this version of Stepwell; name another folder to start anew")
    return Checkpoint(**values)


def random_state() -> "dict[str, torch.Tensor]":
    import torch

    of_devices = {str(device): state for device, state in enumerate(torch.cuda.get_rng_state_all())}
    return {"cpu": torch.get_rng_state(), **of_devices}


def set_random_state(state: "dict[str, torch.Tensor]") -> None:
    import torch

    torch.set_rng_state(state["cpu"])
    for device in range(min(torch.cuda.device_count(), len(state) - 1)):
        torch.cuda.set_rng_state(state[str(device)], device)
