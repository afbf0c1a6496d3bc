"""The state of a training run on disk.

Invariants:
- The checkpoint file is whole or absent, at whatever moment the process dies.
- The trajectories that a checkpoint names are in its weights, and no others are. Where single steps are trained, it
  names steps.
"""

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from stepwell.common.files import SUFFIX, replacing_file
from stepwell.errors import BadRequest
from stepwell.trainers.feed import FeedState

if TYPE_CHECKING:
    import torch

FILE = "trainer.pt"
TensorState: TypeAlias = dict[str, Any]
"""torch's state_dict."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Checkpoint(FeedState):
    """A model with its optimizer, and what of the pool's data is in them. An older file has no `statistics`."""

    model: TensorState
    optimizer: TensorState
    random: "dict[str, torch.Tensor]"
    """The state of torch's random number generators, by device."""
    update: int
    version: int


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    values = {of.name: getattr(checkpoint, of.name) for of in fields(Checkpoint)}
    for unfinished in folder.glob(f"{FILE}.*{SUFFIX}"):  # of a trainer that was killed while it wrote
        unfinished.unlink()
    with replacing_file(folder / FILE) as file:
        torch.save(values, file)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint in the folder; None if there is none yet."""
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
