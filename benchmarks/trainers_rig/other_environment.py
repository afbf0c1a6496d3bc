"""How a program of this benchmark is run in another trainer's environment (scripts/trainer_envs.py)."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from benchmarks.environments import installed_python
from benchmarks.trainers_rig.stage import TRAINED, Stage
from benchmarks.trainers_rig.timed_run import Length, Round, rounds_told
from benchmarks.truth_rig.other_trainers import SETTINGS

TIMEOUT = 1800.0
"""Seconds for all rounds."""
SHOWN = 8000
"""Characters of its output in an error text."""


def run_program(
    environment: str, stage: Stage, length: Length, *, name: str, more: Mapping[str, object] | None = None
) -> list[Round]:
    """Runs `programs/train_in_NAME.py` for all rounds."""
    python = installed_python(environment)
    assert python is not None
    asked = {
        "pool": TRAINED,
        "address": stage.ray_address,
        "namespace": stage.namespace,
        "channels": stage.fill(name, length.rounds),
        "model": str(stage.model_folder),
        "rows": str(stage.plain_rows_file()),
        "folder": str(stage.folder),
        "updates": length.updates,
        "unmeasured": length.unmeasured,
        "samples": length.samples,
        **(more or {}),
    }
    command = [str(python), "-m", f"benchmarks.trainers_rig.programs.train_in_{name}", json.dumps(asked)]
    log = stage.folder / f"{name}.log"
    with log.open("w") as output:
        done = subprocess.run(
            command,
            env={**os.environ, **SETTINGS},
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT,
            check=False,
        )
    told = Path(log).read_text()
    if done.returncode:
        raise RuntimeError(f"{name} did not train: {told[-SHOWN:]}")
    return rounds_told(told)
