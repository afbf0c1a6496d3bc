"""verl's own main_ppo, started as a user starts it, on a CPU."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rig.trainers.process import CHECKOUT, SETTINGS, trainer_python

RIG = Path(__file__).parent / "verl_on_cpu"
SEARCH = f"hydra.searchpath=[pkg://stepwell.trainers.verl,file://{RIG}]"
PATHS = os.pathsep.join([str(CHECKOUT / "src"), str(RIG)])
ON_CPU = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "stepwell_verl_cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "PYTHONPATH": PATHS,
}
RESOURCES = {"num_cpus": 12, "num_gpus": 1}
"""What verl asks of Ray, in a node of its own."""
ALIKE = 1e-4
"""What the log-probabilities of vLLM and verl may differ by after a sync; with more, the run fails."""


@dataclass(frozen=True, slots=True)
class VerlRun:
    process: "subprocess.Popen[str]"
    log: Path
    metrics_file: Path

    def metrics(self) -> list[dict[str, Any]]:
        """Of the steps so far, verl's own and ours."""
        if not self.metrics_file.exists():
            return []
        lines = [line for line in self.metrics_file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [{"step": told["step"], **told["data"]} for told in map(json.loads, lines)]

    def kill(self) -> None:
        """SIGKILL to the command; Ray then ends the processes that it started."""
        self.process.kill()
        self.process.wait()

    def wait(self, timeout: float) -> list[dict[str, Any]]:
        """The metrics of its steps, once it has ended well."""
        try:
            self.process.wait(timeout)
        finally:
            self.kill()
        assert self.process.returncode == 0, self.log.read_text()[-8000:]
        return self.metrics()


def start_verl(address: str, overrides: Mapping[str, object], *, folder: Path, name: str) -> VerlRun:
    """`address` is that of the pool's Ray; `name` is that of its files in `folder`."""
    log, metrics_file, python = folder / f"{name}.log", folder / f"{name}.jsonl", trainer_python("verl")
    environment = "ray_kwargs.ray_init.runtime_env.env_vars"
    told = {
        "ray_kwargs.ray_init.runtime_env.py_executable": python,
        f"+{environment}.PYTHONPATH": PATHS,
        f"+{environment}.VERL_FILE_LOGGER_PATH": metrics_file,
        "trainer.logger": "[console,file]",
        "trainer.default_local_dir": folder / "checkpoints",
        "trainer.v1.stepwell.weights": folder / "weights",
        "trainer.v1.stepwell.tolerance": ALIKE,
        "data.max_prompt_length": 64,
        "data.max_response_length": 64,
        **overrides,
    }
    command = [str(python), "-m", "verl.trainer.main_ppo", SEARCH, "+config=[stepwell,cpu]"]
    command += [f"{key}={value}" for key, value in told.items()]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **SETTINGS, **ON_CPU, "RAY_ADDRESS": address},
            cwd=folder,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            text=True,
        )
    return VerlRun(process, log, metrics_file)
