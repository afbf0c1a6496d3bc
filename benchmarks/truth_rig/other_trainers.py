"""The gradients of TRL and verl, computed by their own code in their own environments (scripts/trainer_envs.py).

All cases go to one process per trainer, in a file, and their gradients come back in another. Where an environment is
not installed, the loss is computed here as that trainer defines it, and the label says so.
"""

import os
import pickle
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import torch

from benchmarks.environments import installed_python
from benchmarks.truth_rig.gradients import Case, with_trl, with_verl

CHECKOUT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "PYTHONPATH": f"{CHECKOUT / 'src'}:{CHECKOUT}",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
OtherTrainers: TypeAlias = Callable[[str, Sequence[Case]], "OtherGradients"]
"""From the name of a trainer and cases to their gradients."""
TIMEOUT = 300.0
"""Seconds that a trainer has for all cases."""
FORMULAS: dict[str, Callable[[Case], torch.Tensor]] = {"trl": with_trl, "verl": with_verl}


@dataclass(frozen=True, slots=True)
class OtherGradients:
    computed_by: str
    """`trl 1.16.0`, or `trl: formula`."""
    gradients: list[torch.Tensor]
    """One per case."""


def gradients_of(trainer: str, cases: Sequence[Case]) -> OtherGradients:
    """By the trainer's own code if it is installed."""
    python = installed_python(trainer)
    if python is None:
        return by_formula(trainer, cases)
    with TemporaryDirectory() as folder:
        asked, answer = Path(folder, "cases"), Path(folder, "gradients")
        asked.write_bytes(pickle.dumps(list(cases)))
        program = f"benchmarks.truth_rig.programs.{trainer}_gradients"
        command = [str(python), "-m", program, str(asked), str(answer)]
        done = subprocess.run(command, env={**os.environ, **SETTINGS}, capture_output=True, text=True, timeout=TIMEOUT)
        if done.returncode:
            raise RuntimeError(f"{trainer} computed no gradients: {done.stderr[-4000:]}")
        told = torch.load(answer)
    return OtherGradients(f"{trainer} {told['version']}", told["gradients"])


def by_formula(trainer: str, cases: Sequence[Case]) -> OtherGradients:
    return OtherGradients(f"{trainer}: formula", [FORMULAS[trainer](case) for case in cases])
