"""Where a run stands, on disk.

What always holds: the file is whole or absent, whenever the process dies; what it says was trained is in the weights
beside it, and in no others.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from stepwell.errors import BadRequest

if TYPE_CHECKING:
    import torch

FILE = "trainer.pt"
TensorState: TypeAlias = dict[str, Any]
"""What torch calls a state_dict."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Checkpoint:
    model: TensorState
    optimizer: TensorState
    random: "dict[str, torch.Tensor]"
    """The state of torch's random numbers, by device."""
    update: int
    version: int
    leases: list[tuple[str, str]]
    """What was trained and had not been acknowledged when this was written."""
    trajectories: list[str]
    """The last that were trained, the oldest first: those of the leases above, and many before them."""


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{FILE}.tmp"
    fields = {name: getattr(checkpoint, name) for name in Checkpoint.__dataclass_fields__}
    with unfinished.open("wb") as file:
        torch.save(fields, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, folder / FILE)
    _sync_folder(folder)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """None where there is none yet."""
    import torch

    path = folder / FILE
    if not path.exists():
        return None
    fields = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(fields, dict) or fields.keys() != Checkpoint.__dataclass_fields__.keys():
        raise BadRequest(f"{path} is no checkpoint of this version of Stepwell; name another folder to start anew")
    return Checkpoint(**fields)


def random_state() -> "dict[str, torch.Tensor]":
    import torch

    of_devices = {str(device): state for device, state in enumerate(torch.cuda.get_rng_state_all())}
    return {"cpu": torch.get_rng_state(), **of_devices}


def set_random_state(state: "dict[str, torch.Tensor]") -> None:
    import torch

    torch.set_rng_state(state["cpu"])
    for device in range(min(torch.cuda.device_count(), len(state) - 1)):
        torch.cuda.set_rng_state(state[str(device)], device)


def _sync_folder(folder: Path) -> None:
    """Makes the new name outlive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
